"""What the guard logs, what it notices, and what it puts back at the end."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from routeguard import Anchor, Interpolate, LowLR, QKPro, QKRestore, RouteGuard, Track, find_routes, freeze, track
from routeguard.drift.record import read_drift
from routeguard.restoration.in_memory import restore
from tests.loops import assert_moved, assert_same, routed_values, tiny, train
from tests.trainers import dataset, make, parameters, run

pytestmark = pytest.mark.filterwarnings("ignore")


class Keep(TrainerCallback):
    """Keeps a copy of the routed rows after every step, to compute drift from by hand."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.rows[0] = routed_values(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.rows[state.global_step] = routed_values(model)


@pytest.mark.parametrize("case", ["lfm2", "qwen3_next", "phi3", "granitemoehybrid"])
def test_drift_of_every_step_equals_a_plain_computation(case: str, tmp_path: Path) -> None:
    keep = Keep()
    trainer = run(tiny(case), tmp_path, RouteGuard("track"), keep, max_steps=5)
    routes = find_routes(trainer.model)
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    assert [s.step for s in samples] == [1, 2, 3, 4, 5]
    for sample in samples:
        for (layer, role), value in sample.factors.items():
            changed = start = 0.0
            for route in routes:
                if (route.layer, route.role) == (layer, role):
                    only = routes.select(layers=[layer], roles=[role])
                    now, then = (
                        routed_slice(keep.rows[step][route.parameter], routes, only, route) for step in (sample.step, 0)
                    )
                    changed += (now.double() - then.double()).square().sum().item()
                    start += then.double().square().sum().item()
            assert value == pytest.approx((changed / start) ** 0.5, rel=1e-4)
    logged = [r for r in trainer.state.log_history if "routeguard/drift_query" in r]
    assert [r["step"] for r in logged] == [2, 4]
    assert logged[-1]["routeguard/drift_max"] == pytest.approx(max(samples[3].factors.values()))


def routed_slice(merged: torch.Tensor, routes, only, route) -> torch.Tensor:
    """The rows of one route out of the merged rows that `routed_values` copied."""
    held = routes.rows_of(route.parameter)
    if route.rows is None or held == route.rows:
        return merged
    index = [row for start, stop in held or ((0, route.shape[0]),) for row in range(start, stop)]
    wanted = {row for start, stop in route.rows for row in range(start, stop)}
    return merged[[at for at, row in enumerate(index) if row in wanted]]


def test_the_logit_form_is_logged_where_it_exists(tmp_path: Path) -> None:
    trainer = run(tiny("granitemoehybrid"), tmp_path, RouteGuard("track"))
    logged = [r for r in trainer.state.log_history if "routeguard/routing_drift" in r]
    assert [r["step"] for r in logged] == [2, 4]
    assert 0 < logged[0]["routeguard/routing_drift"] < logged[1]["routeguard/routing_drift_max"]
    guard = RouteGuard("track")
    normed = run(tiny("lfm2"), tmp_path / "b", guard)
    assert not any("routeguard/routing_drift" in r for r in normed.state.log_history)
    assert "factors only" in guard.summary and "normalised" in guard.summary


def test_drift_reaches_every_reporter(tmp_path: Path) -> None:
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    run(tiny(), tmp_path, Reporter(), RouteGuard("track"))
    assert sum("routeguard/drift_query" in logs for logs in seen) == 2


@pytest.mark.parametrize("mode", ["track", "freeze"])
def test_a_run_too_short_for_a_log_line_says_its_drift_at_the_end(mode: str, tmp_path: Path, capsys) -> None:
    run(tiny(), tmp_path / "short", RouteGuard(mode), max_steps=3, logging_steps=10)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "drift at the end" in line]
    _, samples = read_drift(tmp_path / "short" / "routeguard" / "drift.jsonl")
    assert said == f"routeguard: drift at the end: {samples[-1]}" and said.endswith(", step 3")
    assert ("query 0, key 0," in said) is (mode == "freeze")
    run(tiny(), tmp_path / "long", RouteGuard(mode), max_steps=3, logging_steps=2)  # its log line has the drift
    assert "drift at the end" not in capsys.readouterr().out


def test_restore_at_the_end_is_what_save_model_sees(tmp_path: Path) -> None:
    start = tiny()
    before = routed_values(start)
    trainer = run(tiny(), tmp_path, RouteGuard(Track(), QKRestore()), save_strategy="steps", save_steps=4)
    trainer.save_model(tmp_path / "final")
    final, last = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "checkpoint-4"))
    assert_same(before, {n: final[n] for n in before})
    # The last checkpoint stays as trained, so that it can be resumed.
    assert_moved(before, {n: last[n] for n in before})
    free = run(tiny(), tmp_path / "b")
    assert_same(
        {n: p for n, p in parameters(free).items() if n not in before},
        {n: p for n, p in parameters(trainer).items() if n not in before},
    )
    assert any("routeguard/drift_before_restore" in r for r in trainer.state.log_history)
    assert (tmp_path / "routeguard" / "restore.json").is_file()


@pytest.mark.parametrize("method", [QKPro(0.1), Interpolate(0.5)], ids=["qk_pro", "interpolate"])
def test_other_restores_equal_the_plain_function(method, tmp_path: Path) -> None:
    guarded = run(tiny("granitemoehybrid"), tmp_path / "a", RouteGuard(Track(), method))
    plain = run(tiny("granitemoehybrid"), tmp_path / "b")
    restore(plain.model, tiny("granitemoehybrid"), method=method)
    assert_same(parameters(plain), parameters(guarded))


def test_restore_comes_after_the_best_model_is_loaded_and_before_reporters_end(tmp_path: Path) -> None:
    ended = {}

    class Uploads(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            ended.update(routed_values(model))

    start = routed_values(tiny())
    trainer = make(
        tiny(),
        tmp_path,
        Uploads(),
        RouteGuard(Track(), QKRestore()),
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        trainer_options={"eval_dataset": dataset(4)},
    )
    trainer.train()
    assert_same(start, ended)
    assert_same(start, routed_values(trainer.model))


class Writes(TrainerCallback):
    """Another callback that rewrites weights after the step, as EMA does."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            dict(model.named_parameters())[self.name].add_(1e-3)


@pytest.mark.parametrize("case", ["lfm2", "qwen3_next"])
def test_a_frozen_tensor_that_moves_all_the_same_stops_the_run(case: str, tmp_path: Path) -> None:
    name = next(r.parameter for r in find_routes(tiny(case)) if r.role == "query")
    with pytest.raises(RuntimeError, match=r"q_proj.* changed all the same"):
        run(tiny(case), tmp_path, RouteGuard(), Writes(name))


class Unfreezes(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.requires_grad_(True)


def test_unfreezing_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="trainable again"):
        run(tiny(), tmp_path, RouteGuard(), Unfreezes())


class SetsOneRate(TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3


def test_a_lost_learning_rate_ratio_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"not at 0\.1 x"):
        run(tiny(), tmp_path, RouteGuard(LowLR(0.1)), SetsOneRate(), lr_scheduler_type="constant")


@pytest.mark.parametrize("mode", [LowLR(0.01), Anchor(strength=1e-3)], ids=["low_lr", "anchor"])
def test_updates_below_bf16_resolution_are_reported(mode, tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-4, "max_steps": 4}
    with pytest.warns(UserWarning, match="below the resolution of bfloat16"):
        run(tiny(dtype=torch.bfloat16), tmp_path / "a", RouteGuard(mode), **settings)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(tiny(), tmp_path / "b", RouteGuard(mode), **settings)
        run(tiny(dtype=torch.bfloat16), tmp_path / "c", RouteGuard(LowLR(0.9)), learning_rate=3e-2)
    assert not any("resolution" in str(w.message) for w in seen)


def test_an_exception_in_training_leaves_no_wrapper_for_the_next_run(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        broken = True

        def on_step_end(self, args, state, control, **kwargs):
            if self.broken and state.global_step == 2:
                raise KeyboardInterrupt

    fails = Fails()
    guard = RouteGuard("track")
    trainer = make(tiny(), tmp_path, guard, fails)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    fails.broken = False
    trainer.train()
    assert "log" not in vars(trainer)
    logged = [r for r in trainer.state.log_history if "routeguard/drift_query" in r]
    assert [r["step"] for r in logged] == [2, 4]


def test_a_tensor_frozen_by_hand_is_watched_too(tmp_path: Path) -> None:
    """Q/K without gradients from before, an optimizer over everything, and a callback that unfreezes them."""
    model = tiny()
    for route in find_routes(model):
        model.get_parameter(route.parameter).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match="trainable again"):
        run(model, tmp_path, RouteGuard(), Unfreezes(), trainer_options={"optimizers": (optimizer, None)})


def test_a_frozen_run_has_a_line_for_every_step(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard(), max_steps=5)
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    assert [s.step for s in samples] == [1, 2, 3, 4, 5]
    assert all(set(s.factors.values()) == {0.0} for s in samples)


def test_the_drift_before_a_restore_is_that_of_the_restored_model(tmp_path: Path) -> None:
    trainer = run(tiny(), tmp_path, RouteGuard(Track(), QKRestore()), max_steps=5)
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    before = [
        r["routeguard/drift_before_restore"]
        for r in trainer.state.log_history
        if "routeguard/drift_before_restore" in r
    ]
    assert before == [pytest.approx(max(samples[-1].factors.values()), rel=1e-4)]


def test_track_as_a_function_measures_what_the_guard_measures() -> None:
    model = tiny("granitemoehybrid")
    routes = find_routes(model)
    meter = track(model, routes)
    start = routed_values(model, routes)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), after_step=meter.measure)
    samples = meter.read()
    assert [s.step for s in samples] == [0, 1, 2] and not meter.read()
    assert samples[-1].routing and not samples[0].routing
    for route in routes:
        now, then = routed_values(model, routes)[route.parameter], start[route.parameter]
        assert samples[-1].factors[route.layer, route.role] == pytest.approx(
            ((now - then).norm() / then.norm()).item(), rel=1e-4
        )


@pytest.mark.parametrize("case", ["lfm2", "qwen3_next", "granitemoehybrid"])  # whole tensors, rows, a logit form
def test_a_meter_on_a_frozen_model_reads_zero_until_something_writes_to_it(case: str) -> None:
    model = tiny(case)
    routes = find_routes(model)
    frozen = freeze(model, routes)
    meter = track(model, routes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    frozen.attach(optimizer)
    train(model, optimizer, after_step=meter.measure)
    assert [set(sample.factors.values()) for sample in meter.read()] == [{0.0}] * 3
    route = next(r for r in routes if r.role == "query")
    with torch.no_grad():
        model.get_parameter(route.parameter).mul_(1.1)
    meter.measure(4)
    (sample,) = meter.read()
    assert {cell for cell, value in sample.factors.items() if value} == {(route.layer, "query")}
    assert sample.factors[route.layer, "query"] == pytest.approx(0.1, rel=1e-4)
    assert all(0 < head < 1 for head in sample.routing.get(route.layer, ()))


def test_a_meter_on_a_partly_frozen_model_reads_the_rest() -> None:
    model = tiny()
    routes = find_routes(model)
    still, free = routes.layers
    frozen = freeze(model, find_routes(model, layers=[still]))
    meter = track(model, routes)
    train(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), after_step=meter.measure
    )
    factors = meter.read()[-1].factors
    assert frozen.whole and factors[still, "query"] == factors[still, "key"] == 0
    assert factors[free, "query"] > 0 < factors[free, "key"]
