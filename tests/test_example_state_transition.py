"""examples/state_transition.py, shortened: its task, its baselines, its memory, and that what it trains is used."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from routeguard.demo import tasks
from routeguard.demo.model import load_tokenizer
from routeguard.state_transition.step_marks import add_step_tokens

pytestmark = pytest.mark.filterwarnings("ignore")
PATH = Path(__file__).parents[1] / "examples" / "state_transition.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("state_transition_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TESTED_SUMS", (2, 8))
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
    result = example.main(["--steps", "2", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert result["rows"]["base, full attention"][2] > 0.9  # knows how to do it, where it sees everything
    assert result["rows"]["attention to the step only"][8] < 0.5
    assert "token by token the answers are the same: True" in out and "share of sums right" in out
    (short, base_short, _), (long, base_long, _) = (result["costs"][n] for n in (2, 8))
    assert short == long and base_long > base_short
    assert json.loads((tmp_path / "results.json").read_text())["steps"] == 2
