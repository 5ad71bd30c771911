"""A measurement that fails during a training: the training goes on as without it, and everyone is told."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from routeguard import QKRestore, RouteGuard, read_recall
from routeguard.recall.probe_failures import Failures, reason_of, release_memory
from tests.loops import assert_same, tiny
from tests.test_recall_probe import losses, probe
from tests.trainers import parameters, run

pytestmark = pytest.mark.filterwarnings("ignore")


class Breaker(TrainerCallback):
    """Makes the model raise in the middle of a forward pass in evaluation mode, at some steps, and leaves a mess."""

    def __init__(self, model: torch.nn.Module, steps: set[int], error: type[BaseException] = RuntimeError) -> None:
        self.model, self.steps, self.error = model, steps, error
        self.step = 0
        self.tried: list[int] = []
        norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
        self.last = norms[-1]
        self.last.register_buffer("table", torch.ones(3), persistent=False)
        self.last.counter = 7
        self.last.register_forward_pre_hook(self.hook)

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step

    def hook(self, module, args):
        if module.training or self.step not in self.steps:
            return
        self.tried.append(self.step)
        torch.rand(5), random.random(), numpy.random.rand(2)
        self.last.table += 1
        self.last.counter = 8
        self.last.left_over = torch.ones(2)
        self.model.train()
        raise self.error("out of memory in layer 3\nof 4")


def adapted() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
    model = get_peft_model(tiny("llama"), config)
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: tiny("gpt2"), {}),
        (lambda: tiny("lfm2"), {"gradient_checkpointing": True}),
        (adapted, {"sft": True, "bf16": True}),
    ],
    ids=["gpt2", "lfm2 checkpointing", "TRL with LoRA in bf16"],
)
def test_the_run_goes_on_bit_for_bit(make, options: dict, tmp_path: Path) -> None:
    plain = run(make(), tmp_path / "a", **options)
    model, watched = make(), probe()
    breaker = Breaker(model, {1, 2})
    probed = run(model, tmp_path / "b", breaker, watched, **options)
    assert breaker.tried == [1, 2] and sorted(watched.results) == [0, 3, 4]  # tried again at its time
    assert_same(parameters(plain), parameters(probed))
    assert losses(plain) == losses(probed) and len(losses(plain)) == 2
    accuracies = [
        [line["mean_token_accuracy"] for line in t.state.log_history if "mean_token_accuracy" in line]
        for t in (plain, probed)
    ]
    assert accuracies[0] == accuracies[1] and len(accuracies[0]) == (2 if "sft" in options else 0)
    last = breaker.last
    assert torch.equal(last.table, torch.ones(3)) and last.counter == 7 and not hasattr(last, "left_over")
    assert all(module.training for module in model.modules())


def test_it_is_said_once_written_down_and_summed_up(tmp_path: Path, capsys) -> None:
    model, watched = tiny("lfm2"), probe()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = run(model, tmp_path, Breaker(model, {1, 3}), watched)
    reason = "RuntimeError: out of memory in layer 3 of 4"
    said = [str(w.message) for w in caught if "recall measurement" in str(w.message)]
    assert len(said) == 1 and f"at step 1 failed: {reason}. The training goes on" in said[0]
    record = tmp_path / "routeguard" / "recall.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [0, 1, 2, 3, 4]
    assert [line for line in lines[1:] if "failed" in line] == [
        {"step": step, "restored": False, "failed": reason} for step in (1, 3)
    ]
    assert read_recall(record) == watched.results and sorted(watched.results) == [0, 2, 4]
    assert [(failure.step, failure.reason) for failure in watched.failures.found] == [(1, reason), (3, reason)]
    last = [line for line in capsys.readouterr().out.splitlines() if line.strip()][-2:]
    assert (
        last[0].startswith("routeguard: recall probe: 3 measurements and their samples (")
        and "from step 0 to 4" in last[0]
    )
    assert last[1] == f"  2 measurements FAILED, at step 1, 3: {reason}"
    assert [line["step"] for line in trainer.state.log_history if "recall/@40" in line] == [0, 2, 4]


def test_three_in_a_row_are_enough(tmp_path: Path, capsys) -> None:
    model, watched = tiny("lfm2"), probe()
    breaker = Breaker(model, {2, 3, 4, 5, 6})
    guard = RouteGuard("track", restore=QKRestore(), probe=watched)
    trainer = run(model, tmp_path, breaker, guard, max_steps=6)
    assert breaker.tried == [2, 3, 4] and trainer.state.global_step == 6
    assert watched.failures.given_up and sorted(watched.results) == [0, 1] and watched.restored is None
    assert "3 measurements FAILED, at step 2, 3, 4:" in (out := capsys.readouterr().out)
    assert "given up after 3 in a row" in out


def test_a_success_in_between_starts_the_count_anew(tmp_path: Path) -> None:
    model, watched = tiny("lfm2"), probe()
    breaker = Breaker(model, {1, 2, 4, 5, 6})
    run(model, tmp_path, breaker, watched, max_steps=8)
    assert breaker.tried == [1, 2, 4, 5, 6] and sorted(watched.results) == [0, 3]
    model, watched = tiny("lfm2"), probe()
    run(model, tmp_path, Breaker(model, {1, 2, 4, 5}), watched, max_steps=6)
    assert sorted(watched.results) == [0, 3, 6] and not watched.failures.given_up


def test_the_last_step_is_tried_once(tmp_path: Path) -> None:
    """Its events come one after the other: the step's end, the epoch's, the training's (twice)."""
    model, watched = tiny("lfm2"), probe(every=None, share=1e-9)
    breaker = Breaker(model, {4})
    run(model, tmp_path, breaker, watched)
    assert breaker.tried == [4] and sorted(watched.results) == [0]


def test_a_measurement_after_a_restore_may_fail(tmp_path: Path, capsys) -> None:
    model, watched = tiny("lfm2"), probe(every=None, share=1e-9)

    class OnceTheLastIsMeasured(set):
        def __contains__(self, step: object) -> bool:
            return 4 in watched.results

    guard = RouteGuard("track", restore=QKRestore(), probe=watched)
    run(model, tmp_path, Breaker(model, OnceTheLastIsMeasured()), guard)
    assert sorted(watched.results) == [0, 4] and watched.restored is None
    assert "1 measurements FAILED, at step 4 (after the restore): RuntimeError" in capsys.readouterr().out
    assert read_recall(tmp_path / "routeguard" / "recall.jsonl", restored=True) == {}


def test_before_the_first_step_it_raises_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = tiny("lfm2")
    breaker = Breaker(model, {0})
    with pytest.raises(RuntimeError, match="out of memory in layer 3"):
        run(model, tmp_path, breaker, probe())
    assert breaker.step == 0 and all(module.training for module in model.modules())
    assert torch.equal(breaker.last.table, torch.ones(3))


def test_control_c_ends_the_training(tmp_path: Path) -> None:
    model, watched = tiny("lfm2"), probe()
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, Breaker(model, {2}, KeyboardInterrupt), watched)
    assert not watched.failures.found and all(module.training for module in model.modules())


def test_a_reporter_that_cannot_take_the_figures(tmp_path: Path) -> None:
    class Picky(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.global_step == 2 and any(name.startswith("recall/") for name in logs):
                raise OSError("names must not have @ in them")

    plain = run(tiny("gpt2"), tmp_path / "a")
    watched = probe()
    probed = run(tiny("gpt2"), tmp_path / "b", watched, Picky())
    assert_same(parameters(plain), parameters(probed))
    assert losses(plain) == losses(probed) and len(losses(probed)) == 2
    assert sorted(watched.results) == [0, 1, 2, 3, 4]
    assert [failure.reason for failure in watched.failures.found] == ["OSError: names must not have @ in them"]


def test_what_a_failure_holds() -> None:
    """A reason in one line, and no traceback: its frames would keep the failed pass's memory."""
    assert reason_of(ValueError("a\n  b")) == "ValueError: a b" and len(reason_of(ValueError("x" * 999))) == 300
    try:
        raise torch.cuda.OutOfMemoryError("full")
    except RuntimeError as error:
        release_memory(error)
        assert error.__traceback__ is None
        failures = Failures()
        failures.add(3, error, restored=False)
    assert failures.found[0].reason == "OutOfMemoryError: full" and str(Failures()) == ""
