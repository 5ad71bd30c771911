"""What a probe costs: the estimate, the number of samples that it chooses, and when it measures in between."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from routeguard import RecallProbe, read_recall
from routeguard.demo.model import load_tokenizer
from routeguard.recall import probe as probe_module
from routeguard.recall.probe_budget import affordable, choose_budget, choose_questions, step_passes, training_passes
from routeguard.recall.probe_record import recorded_settings
from routeguard.recall.registry import find_tasks
from routeguard.recall.training_length import longest_row, mean_row_tokens, training_length
from tests.loops import tiny
from tests.test_recall_probe import probe
from tests.trainers import dataset, run

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_ends_take_half_of_the_share_at_most() -> None:
    for passes in (1e5, 3e5, 1e6, 1e7, 1e9):
        for lengths, num_tasks, share in (((96, 192), 1, 0.01), ((256, 1024), 2, 0.05)):
            budget = choose_budget(None, passes=passes, lengths=lengths, num_tasks=num_tasks, share=share)
            assert 4 <= budget.num_samples <= 16 and budget.chosen
            assert budget.ends == pytest.approx(2 * budget.num_samples * num_tasks * sum(lengths) / passes)
            assert budget.num_samples == 4 or budget.ends <= share / 2
            one_more = budget.ends * (1 + 1 / budget.num_samples)
            assert budget.num_samples == 16 or one_more > share / 2  # as many as can be had
    counts = [
        choose_budget(None, passes=passes, lengths=(96, 192), num_tasks=1, share=0.01).num_samples
        for passes in (1e5, 1e6, 1.5e6, 1e9)
    ]
    assert counts == [4, 8, 13, 16]


def test_what_is_given_stays_and_fixed_steps_are_counted() -> None:
    given = choose_budget(40, passes=1e6, lengths=(100,), num_tasks=2, share=0.01, every=50, max_steps=320)
    assert given.num_samples == 40 and not given.chosen and given.ends == pytest.approx(0.016)
    assert given.total == pytest.approx(8 * 0.008)  # steps 0, 50, ..., 300, 320
    assert choose_budget(1, passes=1e6, lengths=(100,), num_tasks=1, share=0.01, every=50, max_steps=300).total == (
        pytest.approx(7e-4)
    )
    unknown = choose_budget(None, passes=None, lengths=(100,), num_tasks=1, share=0.01)
    assert unknown.num_samples == 8 and unknown.chosen and unknown.ends is None


def test_a_step_costs_three_forward_passes_or_two_with_adapters() -> None:
    model = tiny("llama")
    assert step_passes(model) == 3.0
    model.gradient_checkpointing_enable()
    assert step_passes(model) == 4.0
    model.gradient_checkpointing_disable()
    assert step_passes(model) == 3.0
    adapted = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert 2.0 < step_passes(adapted) < 2.1


def test_the_length_of_the_training() -> None:
    loader = SimpleNamespace(dataset=dataset(rows=24, length=16))
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert training_passes(tiny("llama"), args, loader, 10) == 2 * 4 * 10 * 16 * 3
    sorted_rows = Dataset.from_dict({"input_ids": [[1] * (i + 1) for i in range(600)]})
    assert mean_row_tokens(SimpleNamespace(dataset=sorted_rows)) == pytest.approx(300, rel=0.01)  # not the first 256
    assert longest_row(SimpleNamespace(dataset=sorted_rows)) > 590
    for unknown in (None, SimpleNamespace(dataset=iter([])), SimpleNamespace(dataset=[torch.zeros(3)])):
        assert mean_row_tokens(unknown) is None and training_passes(tiny("llama"), args, unknown, 10) is None


def test_short_rows_are_short_whatever_max_length_says() -> None:
    args = SimpleNamespace(max_length=1024)
    assert [training_length(args, n) for n in (113, 4000, None)] == [113, 1024, 1024]
    assert training_length(SimpleNamespace(), 113) == 113
    with pytest.raises(ValueError, match="the training length is not known"):
        training_length(SimpleNamespace(max_length=None))


@pytest.mark.parametrize(
    ("passes", "tasks", "lengths", "left_out"),
    [
        (1e9, 2, (100, 200), ""),
        (6.5e5, 2, (100, 200), ""),  # 4 samples of 600 tokens, twice, are 0.74 %
        (6e5, 1, (100, 200), "niah_multikey_2"),
        (3e5, 1, (200,), "niah_multikey_2, 100 tokens"),
        (1e3, 1, (200,), "niah_multikey_2, 100 tokens"),  # even that is too much
        (None, 2, (100, 200), ""),
    ],
)
def test_a_short_training_is_asked_less(passes, tasks, lengths, left_out) -> None:
    both = find_tasks(probe_module.PROBE_TASKS)
    settings = {"passes": passes, "share": 0.01, "every": None, "max_steps": 0}
    asked = choose_questions(both, (100, 200), None, fewer_tasks=True, fewer_lengths=True, **settings)
    assert asked.tasks == both[:tasks] and asked.lengths == lengths
    assert [f": {left_out}" in note for note in asked.notes] == ([True] if left_out else [])
    if passes is not None and passes > 1e3:
        assert asked.budget.ends <= 0.0075
    kept = choose_questions(both, (100, 200), None, fewer_tasks=False, fewer_lengths=False, **settings)
    assert kept.tasks == both and kept.lengths == (100, 200) and not kept.notes


def test_what_is_left_open_shrinks_and_stays_so_on_resume(tmp_path: Path, capsys) -> None:
    """A run of 4 steps trains on 768 passes; two measurements of 4 samples at 40 and 56 tokens take as many."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    open_lengths = {"lengths": None, "num_samples": None, "every": None, "tokenizer": load_tokenizer()}
    short = RecallProbe(tasks="demo_needles", share=0.9, **open_lengths)
    run(tiny("lfm2"), tmp_path, short, max_steps=4, **saving)
    out = capsys.readouterr().out
    assert "left out to keep the cost near share=90.00% of so short a training: " in out
    (length,) = short.results[0].lengths
    assert length > 16
    resumed = RecallProbe(tasks="demo_needles", share=0.9, **open_lengths)
    run(tiny("lfm2"), tmp_path, resumed, max_steps=40, resume=str(tmp_path / "checkpoint-2"), **saving)
    assert resumed.results[40].lengths == (length,)  # a fresh run of 40 steps could afford both


class StopAtOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.parametrize(("steps", "count"), [(4, 4), (14, 7), (400, 16)])
def test_the_probe_chooses_from_the_steps_and_says_so(steps: int, count: int, tmp_path: Path, capsys) -> None:
    """A step trains on 4 rows of 16 tokens, which is 192 passes; one sample of each length has 40 + 56 tokens."""
    watched = probe(num_samples=None, every=None, share=1.0)
    run(tiny("lfm2"), tmp_path, watched, StopAtOnce(), max_steps=steps)
    assert watched.results[0].settings["num_samples"] == count and len(watched.results[0].scores) == 2 * count
    out = capsys.readouterr().out
    assert f"at 40, 56 tokens, {count} samples each (chosen)" in out
    ends = 2 * count * 96 / (steps * 192)
    assert f"cost: the first and the last take about {ends:.2%} of the training (estimated from tokens)" in out
    assert ("even 4 samples each cost more than share=100.00%" in out) == (ends > 1)


def test_what_is_too_expensive_or_unknown_is_said(tmp_path: Path, capsys) -> None:
    assert RecallProbe().num_samples is None
    run(tiny("lfm2"), tmp_path / "a", probe(num_samples=None, every=None))
    out = capsys.readouterr().out
    assert (
        "about 100.00% of the training (estimated from tokens); even 4 samples each cost more than share=1.00%" in out
    )
    assert "ask fewer lengths, or train longer" in out
    run(tiny("lfm2"), tmp_path / "one", probe(num_samples=None, every=None, lengths=(56,)))
    out = capsys.readouterr().out
    assert "above share=1.00% in so short a training: 4 samples of one task at one length are the least" in out
    assert "train longer" not in out
    run(tiny("lfm2"), tmp_path / "b", probe(num_samples=3, every=1, share=1.0))
    out = capsys.readouterr().out
    assert (
        "3 samples each, every 1 steps" in out and "all of them 187.50% with every=1; 3 samples each cost more" in out
    )
    assert "ask fewer lengths, less often (every=), or train longer" in out
    ids = dataset(rows=8)["input_ids"]
    rows = IterableDataset.from_generator(lambda: ({"input_ids": row, "labels": row} for row in ids))
    run(tiny("lfm2"), tmp_path / "c", probe(num_samples=None), trainer_options={"train_dataset": rows}, max_steps=1)
    out = capsys.readouterr().out
    assert "8 samples each (chosen)" in out and "cost: not known, since the rows of the training data tell no" in out
    summary = out.splitlines()[-1]
    assert "% of the training)" in summary


def test_a_resumed_run_keeps_its_number(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    run(tiny("lfm2"), tmp_path, probe(num_samples=None, share=1.0), max_steps=4, **saving)
    record = tmp_path / "routeguard" / "recall.jsonl"
    assert recorded_settings(record)["num_samples"] == 4
    resumed = probe(num_samples=None, share=1.0)
    run(tiny("lfm2"), tmp_path, resumed, max_steps=14, resume=str(tmp_path / "checkpoint-2"), **saving)
    assert resumed.results[14].settings["num_samples"] == 4  # a fresh run of 14 steps would have 7
    assert sorted(read_recall(record)) == list(range(15))
    assert recorded_settings(tmp_path / "nothing") is None
    record.write_text("[]\n")
    assert recorded_settings(record) is None


@pytest.mark.parametrize(("first", "later"), [(0.1, 0.1), (0.3, 0.1), (0.1, 0.2)])
def test_all_measurements_together_stay_within_the_share(first: float, later: float) -> None:
    """A simulated run of 100 s, a step every 50 ms; the first measurement may be slower, or the later ones."""
    elapsed = last = spent = took = first
    at = []
    while elapsed < 100:
        elapsed += 0.05
        if affordable(spent=spent, took=took, since_last=elapsed - last, elapsed=elapsed, share=0.01):
            elapsed, spent, took = elapsed + later, spent + later, later
            at.append(elapsed)
            last = elapsed
    spent += later
    assert spent <= 0.01 * elapsed + 2 * max(later - first, 0)  # a rise in cost is seen one measurement late
    assert at and all(b - a >= later / 0.01 for a, b in itertools.pairwise(at))
    assert at[0] >= 3 * first / 0.01  # the first, this one and the last one are paid for


def test_what_fails_at_once_is_not_tried_again_at_once(tmp_path: Path) -> None:
    watched = probe(every=None, share=1e-3)
    run(tiny("lfm2"), tmp_path, watched)
    took = watched.seconds[0]
    watched._spent = watched._began = 0.0
    watched._took = took
    with pytest.raises(ZeroDivisionError):
        watched._measure(
            SimpleNamespace(answer=lambda *args: 1 / 0), tiny("lfm2"), None, SimpleNamespace(global_step=9), None
        )
    assert watched._took == took and 0 < watched._spent < took


def test_making_the_samples_is_part_of_the_cost(tmp_path: Path, monkeypatch) -> None:
    watched = probe()
    original = probe_module.probe_samples

    def slow(*args, **options):
        time.sleep(0.3)
        return original(*args, **options)

    monkeypatch.setattr(probe_module, "probe_samples", slow)
    run(tiny("lfm2"), tmp_path, watched, max_steps=1)
    assert watched._spent >= 0.3 + sum(watched.seconds.values())
