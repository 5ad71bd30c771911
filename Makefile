PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# One thread a worker: the tests' models are tiny, and two workers on two cores are the faster half of the bargain.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
LAB_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test test-slow test-all test-oldest test-integrations check format docs bench bench-gpu lab lab-full clean

$(VENV)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/routeguard demo

test: $(VENV)/ready
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: $(VENV)/ready
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

test-all: test test-slow

# The oldest releases that pyproject.toml allows (torch excepted), and the tests that pass through every entry point once.
OLDEST_VENV := .venv-oldest
OLDEST := versions cli remote_code routes_edge guard_drift_and_restore guard_errors guard_peft guard_resume freeze low_lr \
	anchor trl_trainers restore recall_measure recall_probe diagnostics_importance diagnostics_cli report \
	l2_sp_adapters average guard_average several_adapters

$(OLDEST_VENV)/ready: constraints-oldest.txt pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet -c constraints-oldest.txt -e '.[dev]'
	touch $@

test-oldest: $(OLDEST_VENV)/ready
	$(TEST_ENV) $(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" \
		$(OLDEST:%=tests/test_%.py)

# The plug-ins in the tools themselves, whose pins exclude one another: an environment each, with what the tests need of each
# tool (no web interface, no cloud storage, no GPU kernels). A part of CI it is not: minutes, and gigabytes.
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS := axolotl swift llamafactory lightning unsloth

$(INTEGRATIONS_VENV)/%/ready: tests/tools/requirements-%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	$(@D)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

test-integrations: $(INTEGRATIONS:%=$(INTEGRATIONS_VENV)/%/ready)
	set -e; for tool in $(INTEGRATIONS); do \
		$(TEST_ENV) $(INTEGRATIONS_VENV)/$$tool/bin/python -m pytest tests/test_integrations_tools.py; done

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, in build/site; from an environment of its own with nothing in it but the extra `docs`.
DOCS_VENV := .venv-docs
DOCS_EXTRA = $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr ',' ' ' | tr -d '"')

$(DOCS_VENV)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt $(foreach need,$(DOCS_EXTRA),'$(need)')
	touch $@

docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.recall
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.state_transition

bench-gpu: $(VENV)/ready
	$(BIN)/python -m benchmarks --device cuda

lab: $(VENV)/ready
	$(LAB_ENV) $(BIN)/python -m benchmarks.lab run --quick --workers $(WORKERS)

# Hours; whatever is done stays done, so it may be stopped and started again.
lab-full: $(VENV)/ready
	$(LAB_ENV) $(BIN)/python -m benchmarks.lab pretrain --workers $(WORKERS)
	$(LAB_ENV) $(BIN)/python -m benchmarks.lab run --workers $(WORKERS)
	$(LAB_ENV) $(BIN)/python -m benchmarks.lab run --confirm --workers $(WORKERS)
	$(LAB_ENV) $(BIN)/python -m benchmarks.lab run --confirm --architecture lfm2 --data cups instruction --workers $(WORKERS)
	$(LAB_ENV) $(BIN)/python -m benchmarks.lab report

clean:
	rm -rf $(VENV) $(OLDEST_VENV) $(INTEGRATIONS_VENV) $(DOCS_VENV) build dist *.egg-info
