"""RouteGuard in real Trainer and SFTTrainer runs: what is protected, to the bit, against plain references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from routeguard import Anchor, LowLR, RouteGuard, Track, find_routes
from routeguard.protect.rows import clear_rows, put_rows, take_rows
from routeguard.routes.collection import Routes, Rows
from tests.loops import assert_moved, assert_same, routed_values, tiny
from tests.trainers import make, parameters, run

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "no_clipping": {"max_grad_norm": 0.0},
    "sgd": {"optim": "sgd"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["lfm2", "qwen3_next", "phi3", "deepseek_v3"])
@pytest.mark.parametrize("sft", [False, True], ids=["Trainer", "SFTTrainer"])
def test_freeze_holds_every_bit(case: str, dtype, settings: str, sft: bool, tmp_path: Path) -> None:
    model = tiny(case, dtype=dtype)
    before = routed_values(model)
    trainer = run(model, tmp_path, RouteGuard(), sft=sft, **SETTINGS[settings])
    assert_same(before, routed_values(trainer.model))


@pytest.mark.parametrize("case", ["lfm2", "qwen3_next", "phi3", "deepseek_v3"])
@pytest.mark.parametrize("sft", [False, True], ids=["Trainer", "SFTTrainer"])
def test_unguarded_the_same_rows_move(case: str, sft: bool, tmp_path: Path) -> None:
    model = tiny(case)
    before = routed_values(model)
    trainer = run(model, tmp_path, sft=sft)
    assert_moved(before, routed_values(trainer.model))


def starting_rows(model: nn.Module, routes: Routes) -> list[tuple[nn.Parameter, Rows | None, Tensor]]:
    """For each routed parameter itself, its rows, and a copy of them."""
    named, start = dict(model.named_parameters()), routed_values(model, routes)
    return [(named[n], routes.rows_of(n), start[n]) for n in routes.parameters]


class ZeroAndPutBack(TrainerCallback):
    """The definition of a row freeze: zero the gradient before clipping, copy the rows back after the step."""

    def __init__(self, *roles: str) -> None:
        self.roles = roles

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.parts = starting_rows(model, find_routes(model, roles=self.roles))
        assert all(rows is not None for _, rows, _ in self.parts)
        for parameter, rows, _ in self.parts:
            parameter.register_post_accumulate_grad_hook(lambda p, rows=rows: clear_rows(p.grad, rows))

    def on_optimizer_step(self, args, state, control, **kwargs):
        with torch.no_grad():
            for parameter, rows, start in self.parts:
                put_rows(parameter, rows, start)


@pytest.mark.parametrize("case", ["qwen3_next", "phi3"])
def test_freeze_of_rows_equals_its_definition(case: str, tmp_path: Path) -> None:
    guarded = run(tiny(case), tmp_path / "a", RouteGuard(roles=["query"]))
    plain = run(tiny(case), tmp_path / "b", ZeroAndPutBack("query"))
    assert_same(parameters(plain), parameters(guarded))


OPTIMS = {"adamw_torch_fused": {}, "adamw_torch": {}, "sgd": {"lr": 0.1}, "adafactor": {}}


@pytest.mark.parametrize("optim", OPTIMS)
def test_low_lr_equals_two_hand_made_groups(optim: str, tmp_path: Path) -> None:
    guarded = run(tiny(), tmp_path / "a", RouteGuard(LowLR(scale=0.1)), optim=optim)
    plain = make(tiny(), tmp_path / "b", optim=optim)
    routing = set(find_routes(plain.model).parameters)
    cls, options = plain.get_optimizer_cls_and_kwargs(plain.args, plain.model)
    decay = set(plain.get_decay_parameter_names(plain.model))
    rate = options.pop("lr")
    buckets: dict[tuple[bool, bool], list] = {}
    for name, parameter in plain.model.named_parameters():
        buckets.setdefault((name in routing, name not in decay), []).append(parameter)
    plain.optimizer = cls(
        [
            {"params": ps, "lr": rate * (0.1 if routed else 1.0), "weight_decay": 0.0 if undecayed else 0.1}
            for (routed, undecayed), ps in sorted(buckets.items())
        ],
        **options,
    )
    plain.train()
    assert_same(parameters(plain), parameters(guarded))
    free = run(tiny(), tmp_path / "c", optim=optim)
    assert any(not torch.equal(parameters(free)[n], parameters(guarded)[n]) for n in routing)


class PullAfterStep(TrainerCallback):
    """The definition of the anchor, written out."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.parts = starting_rows(model, find_routes(model))

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        with torch.no_grad():
            weight = optimizer.param_groups[0]["lr"] * self.strength
            for parameter, rows, start in self.parts:
                put_rows(parameter, rows, torch.lerp(take_rows(parameter, rows), start, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["lfm2", "qwen3_next"])
def test_anchor_equals_its_definition(case: str, dtype, tmp_path: Path) -> None:
    settings = {"weight_decay": 0.0}
    guarded = run(tiny(case, dtype=dtype), tmp_path / "a", RouteGuard(Anchor(strength=20.0)), **settings)
    plain = run(tiny(case, dtype=dtype), tmp_path / "b", PullAfterStep(20.0), **settings)
    assert_same(parameters(plain), parameters(guarded))
    free = run(tiny(case, dtype=dtype), tmp_path / "c", **settings)
    assert any(not torch.equal(parameters(free)[n], parameters(guarded)[n]) for n in find_routes(free.model).parameters)


def test_track_changes_nothing(tmp_path: Path) -> None:
    guarded = run(tiny(), tmp_path / "a", RouteGuard(Track()))
    plain = run(tiny(), tmp_path / "b")
    assert_same(parameters(plain), parameters(guarded))


def test_norms_are_held_only_when_asked_for(tmp_path: Path) -> None:
    for norms in (False, True):
        model = tiny()
        names = [r.parameter for r in find_routes(model, norms=True) if r.kind == "norm"]
        before = {n: p.detach().clone() for n, p in model.named_parameters() if n in names}
        trainer = run(model, tmp_path / str(norms), RouteGuard(norms=norms))
        after = {n: p for n, p in parameters(trainer).items() if n in names}
        (assert_same if norms else assert_moved)(before, after)


def test_layers_and_roles_narrow_the_hold(tmp_path: Path) -> None:
    model = tiny()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = run(model, tmp_path, RouteGuard(layers=[5], roles="key"))
    same = {n for n, p in parameters(trainer).items() if torch.equal(p, before[n])}
    assert same == {"model.layers.5.self_attn.k_proj.weight"}


def test_model_init_is_frozen_again(tmp_path: Path) -> None:
    made = []

    def init():
        made.append(tiny())
        return made[-1]

    trainer = run(None, tmp_path, RouteGuard(), trainer_options={"model_init": init})
    assert len(made) >= 2 and trainer.model is made[-1]
    start = routed_values(tiny())
    assert_same(start, routed_values(trainer.model))


def test_a_second_train_is_guarded_too(tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    before = routed_values(model)
    trainer = run(model, tmp_path, RouteGuard())
    trainer.args.max_steps = 6
    trainer.train()
    assert_same(before, routed_values(trainer.model))


@pytest.mark.parametrize("mode", ["freeze", "low_lr", "anchor", "track"])
def test_nothing_is_left_behind(mode: str, tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    modules, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    guard = RouteGuard(mode)
    trainer = run(model, tmp_path, guard)
    optimizer = trainer.optimizer.optimizer
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    assert "log" not in vars(trainer)
    guard.detach()
    assert "create_optimizer" not in vars(trainer)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert modules == [n for n, _ in model.named_modules()] and keys == list(model.state_dict())


@pytest.mark.parametrize("mode", ["low_lr", "anchor"])
def test_after_detach_everything_trains_again(mode: str, tmp_path: Path) -> None:
    model = tiny("qwen3_5_text")
    guard = RouteGuard(mode)
    trainer = run(model, tmp_path, guard)
    guard.detach()
    before = parameters(trainer)
    trainer.train()
    assert_moved(before, parameters(trainer))


def test_rates_of_ones_own_keep_their_ratio(tmp_path: Path) -> None:
    model = tiny()
    routing = [model.get_parameter(name) for name in find_routes(model).parameters]
    rest = [p for p in model.parameters() if all(p is not q for q in routing)]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 1e-3}, {"params": routing, "lr": 5e-4}])
    run(model, tmp_path, RouteGuard(LowLR(0.1)), trainer_options={"optimizers": (optimizer, None)})
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05 * optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("mode", ["freeze", "low_lr", "anchor"])
@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
def test_mixed_precision_and_checkpointing_as_trl_has_them(mode: str, case: str, tmp_path: Path) -> None:
    """bf16 autocast over float32 weights, gradient checkpointing: TRL's defaults."""
    settings = {"sft": True, "bf16": True, "gradient_checkpointing": True}
    model = tiny(case)
    before = routed_values(model)
    trainer = run(model, tmp_path / "a", RouteGuard(mode), **settings)
    after = routed_values(trainer.model)
    if mode == "freeze":
        assert_same(before, after)
        return
    free = run(tiny(case), tmp_path / "b", **settings)
    for name, value in routed_values(free.model).items():
        assert 0 < (after[name] - before[name]).norm() < 0.8 * (value - before[name]).norm()
