"""RecallProbe's last measurement: wherever the stop was decided, and before and after a guard's restore."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from routeguard import QKRestore, RecallProbe, RouteGuard, measure_recall, read_recall
from routeguard.demo.model import load_tokenizer
from tests.loops import tiny
from tests.test_recall_probe import probe
from tests.trainers import dataset, run

pytestmark = pytest.mark.filterwarnings("ignore")


class Reporter(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen += [f"{state.global_step}:{name}" for name in logs if name.startswith("recall")]


def test_inside_a_guard_with_a_restore_at_the_end(tmp_path: Path, capsys) -> None:
    watched, reporter = probe(every=None, share=1e-9), Reporter()
    guard = RouteGuard("track", restore=QKRestore(), probe=watched)
    trainer = run(tiny("lfm2"), tmp_path, guard, reporter)
    assert sorted(watched.results) == [0, 4]  # the time allows nothing in between
    assert watched.restored is not None
    again = measure_recall(trainer.model, load_tokenizer(), tasks="demo_needles", lengths=(40, 56), num_samples=2)
    nats = [s.nll for s in watched.restored.scores]
    assert [s.nll for s in again.scores] == pytest.approx(nats, rel=1e-3)
    assert nats != [s.nll for s in watched.results[4].scores]
    assert [name for name in reporter.seen if "@56" in name] == [
        "0:recall/@56",
        "4:recall/@56",
        "4:recall_restored/@56",
    ]
    assert read_recall(tmp_path / "routeguard" / "recall.jsonl", restored=True)[4] == watched.restored
    assert "recall probe: demo_needles at 40, 56 tokens" in capsys.readouterr().out
    guard.detach()
    assert not any(isinstance(c, (RouteGuard, RecallProbe)) for c in trainer.callback_handler.callbacks)


class Stop(TrainerCallback):
    """Decides to stop after step 3, in an event that comes after the probe's own."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_training_stop = True


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_epoch_end"])
def test_a_stop_that_is_decided_late_is_measured_too(event: str, tmp_path: Path) -> None:
    watched = probe(every=None, share=1e-9)
    rows = {"train_dataset": dataset(rows=12)}  # three steps an epoch
    trainer = run(tiny("lfm2"), tmp_path, watched, Stop(event), max_steps=8, logging_steps=1, trainer_options=rows)
    assert trainer.state.global_step == 3 and sorted(watched.results) == [0, 3]
    again = measure_recall(trainer.model, load_tokenizer(), tasks="demo_needles", lengths=(40, 56), num_samples=2)
    assert [s.nll for s in again.scores] == pytest.approx([s.nll for s in watched.results[3].scores], rel=1e-3)


def test_early_stopping_is_measured_before_the_guard_restores(tmp_path: Path) -> None:
    watched = probe(every=None, share=1e-9)
    guard = RouteGuard("track", restore=QKRestore(), probe=watched)
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    rows = {"train_dataset": dataset(rows=8), "eval_dataset": dataset(rows=4)}  # two steps an epoch
    stopping = EarlyStoppingCallback(1, early_stopping_threshold=1e9)
    trainer = run(tiny("lfm2"), tmp_path, guard, stopping, max_steps=20, trainer_options=rows, **options)
    assert trainer.state.global_step == 4 and sorted(watched.results) == [0, 4]
    restored, before = ([s.nll for s in result.scores] for result in (watched.restored, watched.results[4]))
    assert restored != before
    again = measure_recall(trainer.model, load_tokenizer(), tasks="demo_needles", lengths=(40, 56), num_samples=2)
    assert [s.nll for s in again.scores] == pytest.approx(restored, rel=1e-3)
    guard.detach()
    assert not any("recall" in type(c).__module__ for c in trainer.callback_handler.callbacks)
