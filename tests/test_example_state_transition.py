"""examples/state_transition.py, shortened: its task, its baselines, its memory, and that what it trains is used."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from routeguard.demo import tasks
from routeguard.demo.model import load_tokenizer
from routeguard.state_transition.step_marks import add_step_tokens

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    spec = importlib.util.spec_from_file_location("state_transition_example", EXAMPLES / "state_transition.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"TESTED_SUMS": (2, 8), "TESTED_CHAINS": 6, "TIMED_CHAINS": 1}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_its_chains_can_be_solved_from_the_facts(example) -> None:
    tokenizer = load_tokenizer()
    marks = add_step_tokens(tokenizer, 2)
    steps = example.chain(5, random.Random(0))
    values = {words[1]: int(words[2]) for words in steps[1:3]}
    assert len(steps) == 8 and len(values) == 2
    for _, name, _, added, _, total, _ in steps[3:]:
        assert (values[name] + int(added)) % 10 == int(total) and tasks.is_known_sum(values[name], int(added))
    ids, labels = example.encode(steps, tokenizer, marks)
    counted = [tokenizer.decode(token) for token in labels if token >= 0]
    assert counted.count("<|step_end|>") == 7 and [c for c in counted if c.isdigit()] == [s[5] for s in steps[3:]]
    assert all(token == label for token, label in zip(ids, labels, strict=True) if label >= 0)


def test_it_runs_and_says_what_it_measured(example, tmp_path: Path, capsys) -> None:
    methods = example.main(["--steps", "2", "--output", str(tmp_path)])["methods"]
    full, window, heavy, ours = (
        methods[name]
        for name in (
            "base, full attention",
            "base, sinks and a window, as many bytes",
            "base, heavy hitters and a window, as many bytes",
            "state transition",
        )
    )
    assert full["accuracy"][8] > 0.9  # knows how to do it, where it sees everything
    assert window["accuracy"][2] > 0.9 > 0.7 > window["accuracy"][8]  # where the facts are in sight, and then not
    assert heavy["accuracy"][8] > window["accuracy"][8]
    assert methods["attention to the step only, untrained"]["accuracy"][8] < 0.5
    assert all(method["same_token_by_token"] for method in (full, window, heavy, ours))
    held = {n: ours["kv_bytes"][n] + ours["state_bytes"][n] for n in (2, 8)}
    assert held[2] == held[8] == window["kv_bytes"][8] == heavy["kv_bytes"][8] < full["kv_bytes"][8]
    assert full["kv_bytes"][2] < full["kv_bytes"][8]
    assert "share of sums right" in capsys.readouterr().out
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["settings"]["steps"] == 2 and written["methods"]["base, full attention"]["accuracy"]["8"] > 0.9
    (tmp_path / "results.json").rename(tmp_path / "chains.json")
    pytest.importorskip("matplotlib")
    importlib.import_module("state_transition_plots").main([str(tmp_path)])
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("chains", "ablations"))


def test_plots_need_results(example, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("state_transition_plots").main([str(tmp_path)])
    assert "holds neither chains.json nor traces.json" in capsys.readouterr().err
