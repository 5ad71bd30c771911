"""RouteGuard beside callbacks that rewrite weights, and after an exception: ordered, refused, nothing left behind."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback
from trl import BEMACallback

from routeguard import Interpolate, QKPro, QKRestore, RouteGuard, Track, find_routes
from routeguard.protect.rows import take_rows
from tests.loops import assert_moved, assert_same, routed_values, tiny
from tests.trainers import MODES, make, run

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = ["lfm2", "qwen3_5_text"]  # whole tensors; rows beside a gate's


class Average(TrainerCallback):
    """An exponential average of all parameters, written over the model at the end, or after every step."""

    def __init__(self, *, live: bool = False, shift: float = 0.0) -> None:
        self.live, self.shift = live, shift

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.average = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        torch._foreach_lerp_(self.average, list(model.parameters()), 0.5)
        if self.live:
            self.write(model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.write(model)

    @torch.no_grad()
    def write(self, model: nn.Module) -> None:
        for parameter, value in zip(model.parameters(), self.average, strict=True):
            parameter.copy_(value + self.shift)


@pytest.mark.parametrize("live", [False, True], ids=["at_the_end", "each_step"])
@pytest.mark.parametrize("case", CASES)
def test_an_average_of_frozen_rows_is_what_they_were(case: str, live: bool, tmp_path: Path) -> None:
    trainer = run(tiny(case), tmp_path, RouteGuard(), Average(live=live))
    assert_same(routed_values(tiny(case)), routed_values(trainer.model))


@pytest.mark.parametrize("live", [False, True], ids=["at_the_end", "each_step"])
@pytest.mark.parametrize("case", CASES)
def test_other_values_over_frozen_rows_are_noticed_even_at_the_end(case: str, live: bool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"_proj.* is held and changed all the same"):
        run(tiny(case), tmp_path, RouteGuard(), Average(live=live, shift=1e-3))


@pytest.mark.parametrize("guard_first", [True, False], ids=["guard_first", "guard_last"])
@pytest.mark.parametrize("case", CASES)
def test_a_restore_comes_after_an_average_that_is_swapped_in(case: str, guard_first: bool, tmp_path: Path) -> None:
    guard = RouteGuard(Track(), QKRestore())
    callbacks = [guard, Average()] if guard_first else [Average(), guard]
    with pytest.warns(UserWarning, match="wrote over the restored queries and keys"):
        trainer = run(tiny(case), tmp_path / "restored", *callbacks)
    assert_same(routed_values(tiny(case)), routed_values(trainer.model))
    plain = run(tiny(case), tmp_path / "plain", Average())
    assert_moved(routed_values(tiny(case)), routed_values(plain.model))
    routed = find_routes(plain.model).parameters
    ours, theirs = dict(trainer.model.named_parameters()), dict(plain.model.named_parameters())
    assert all(torch.equal(ours[name], value) for name, value in theirs.items() if name not in routed)


def test_a_partial_restore_is_that_of_the_average(tmp_path: Path) -> None:
    """Halfway from the average to the start, and not a second time halfway."""
    restored = run(tiny(), tmp_path / "a", RouteGuard(Track(), Interpolate(0.5)), Average())
    plain = run(tiny(), tmp_path / "b", Average())
    start, average = routed_values(tiny()), routed_values(plain.model)
    for name, value in routed_values(restored.model).items():
        torch.testing.assert_close(value, (start[name] + average[name]) / 2)


def test_no_second_restore_where_nobody_writes(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = run(tiny(), tmp_path, RouteGuard(Track(), QKPro(0.1)))
    assert not any("restored again" in str(w.message) for w in seen)
    assert sum("routeguard/drift_before_restore" in line for line in trainer.state.log_history) == 1


@pytest.mark.parametrize("case", CASES)
def test_bema_saves_a_restored_average(case: str, tmp_path: Path) -> None:
    routes, start = find_routes(tiny(case)), routed_values(tiny(case))
    for name, guards in (("restored", [RouteGuard(Track(), QKRestore())]), ("plain", [])):
        run(tiny(case), tmp_path / name, BEMACallback(update_freq=1), *guards)
    averages = {name: load_file(tmp_path / name / "bema" / "model.safetensors") for name in ("restored", "plain")}
    routed = {key: {n: take_rows(a[n], routes.rows_of(n)) for n in start} for key, a in averages.items()}
    assert_same(start, routed["restored"])
    assert_moved(start, routed["plain"])
    rest = [n for n in averages["plain"] if n not in start]
    assert rest and all(torch.equal(averages["plain"][n], averages["restored"][n]) for n in rest)


@pytest.mark.parametrize("case", CASES)
def test_bema_beside_frozen_parameters_is_refused_before_the_first_step(case: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BEMACallback pairs the trainable parameters"):
        run(tiny(case), tmp_path, BEMACallback(update_freq=400), RouteGuard())


class Breaks(TrainerCallback):
    broken = True

    def on_step_begin(self, args, state, control, **kwargs):
        if self.broken and state.global_step == 1:
            raise ZeroDivisionError("a bad sample")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_after_an_exception_detach_leaves_nothing_and_the_guard_serves_again(
    mode: str, case: str, tmp_path: Path
) -> None:
    model, guard, breaks = tiny(case), MODES[mode](), Breaks()
    trainer = make(model, tmp_path / "broken", guard, breaks)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    optimizer = trainer.optimizer.optimizer
    guard.detach()
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert not {"log", "create_optimizer", "save_model"} & vars(trainer).keys()
    assert "on_train_end" not in vars(trainer.callback_handler)
    assert guard not in trainer.callback_handler.callbacks
    assert all(p.requires_grad and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert trainer.optimizer is None or not any("routeguard" in group for group in trainer.optimizer.param_groups)

    breaks.broken = False
    before = routed_values(model)
    trainer.train()  # as if there had been no guard
    assert_moved(before, routed_values(model))

    other = run(tiny(case, seed=1), tmp_path / "other", guard)
    fresh = run(tiny(case, seed=1), tmp_path / "fresh", MODES[mode]())
    assert_same(routed_values(fresh.model), routed_values(other.model))


def test_a_second_guard_that_is_attached_is_refused(tmp_path: Path) -> None:
    trainer = make(tiny(), tmp_path, RouteGuard())
    with pytest.raises(ValueError, match="already has a RouteGuard"):
        RouteGuard("track").attach(trainer)
