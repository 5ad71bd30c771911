"""One guard and several Trainers: one after the other is right, two that wait for their turn are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from routeguard import QKRestore, RouteGuard, Track
from routeguard.training.run_state import read_state
from tests.loops import assert_same, routed_values, tiny
from tests.trainers import drifts, make, run
from tests.tuned import values

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("mode", ["freeze", "anchor", "track"])
def test_a_second_trainer_before_the_first_has_trained_is_refused(mode: str, tmp_path: Path) -> None:
    guard = RouteGuard(mode)
    first = make(tiny(), tmp_path / "a", guard)
    with pytest.raises(ValueError, match="in another Trainer, which has not trained yet"):
        make(tiny(seed=1), tmp_path / "b", guard)
    late = make(tiny(seed=1), tmp_path / "c")
    with pytest.raises(ValueError, match="in another Trainer, which has not trained yet"):
        guard.attach(late)
    first.train()  # the first has its guard as before
    own = run(tiny(), tmp_path / "own", RouteGuard(mode))
    assert_same(values(own.model), values(first.model))
    assert drifts(first) == drifts(own)


def test_detaching_frees_it_for_another(tmp_path: Path) -> None:
    guard = RouteGuard("track")
    make(tiny(), tmp_path / "a", guard)
    guard.detach()
    assert min(drifts(run(tiny(seed=1), tmp_path / "b", guard))) > 0


def test_one_trainer_after_the_other_each_from_its_own_start(tmp_path: Path) -> None:
    guard = RouteGuard(Track(), QKRestore())
    logged, trainers = [], []
    for seed in (1, 2):
        trainers.append(run(tiny(seed=seed), tmp_path / str(seed), guard))
        logged.append(drifts(trainers[-1]))
        assert_same(routed_values(tiny(seed=seed)), routed_values(trainers[-1].model))
        assert any("routeguard/drift_before_restore" in line for line in trainers[-1].state.log_history)
    assert logged == [drifts(run(tiny(seed=s), tmp_path / "own", RouteGuard("track"))) for s in (1, 2)]
    before = values(trainers[0].model)
    with pytest.raises(ValueError, match="has gone on to another Trainer"):
        trainers[0].train()
    assert_same(before, values(trainers[0].model))
    for trainer, seed in zip(trainers, (1, 2), strict=True):
        trainer.save_model(tmp_path / f"saved{seed}")
        assert read_state(tmp_path / f"saved{seed}") == read_state(tmp_path / str(seed))
    assert read_state(tmp_path / "1") != read_state(tmp_path / "2")


def test_the_same_model_goes_on_from_its_first_start(tmp_path: Path) -> None:
    model, guard = tiny(), RouteGuard("track")
    first = drifts(run(model, tmp_path / "a", guard))
    on = run(model, tmp_path / "b", guard, learning_rate=1e-6)
    assert drifts(on)[0] == pytest.approx(first[-1], rel=0.2)


def test_a_run_that_broke_off_may_be_made_again(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("no more")

    guard, model = RouteGuard("low_lr"), tiny()
    with pytest.raises(torch.OutOfMemoryError):
        run(model, tmp_path / "a", guard, Breaks())
    again = run(model, tmp_path / "b", guard)
    assert_same(values(run(tiny(), tmp_path / "own", RouteGuard("low_lr")).model), values(again.model))
    assert min(drifts(again)) > 0
