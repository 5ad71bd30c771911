"""What happens to a model between the making of its Trainer and `train()`: seen, or refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from routeguard import RouteGuard
from tests.loops import assert_moved, assert_same, tiny
from tests.trainers import drifts, make

pytestmark = pytest.mark.filterwarnings("ignore")
MODES = ("freeze", "low_lr", "anchor", "l2_sp", "track")


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"])


def compile_layers(model: nn.Module) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")


def add_adapters(model: nn.Module) -> None:
    get_peft_model(model, lora())


def added_factors(model: nn.Module, module: str) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if module in n and "lora_B.late" in n}


@pytest.mark.parametrize("change", [compile_layers, add_adapters])
@pytest.mark.parametrize("mode", MODES)
def test_routing_tensors_that_go_are_missed(mode: str, change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    trainer = make(tiny(), tmp_path, RouteGuard(mode))
    change(trainer.model)
    with pytest.raises(ValueError, match=r"q_proj\.weight .*is not in the model any more.*guard\.detach\(\)"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_late_adapter_is_refused_or_seen(mode: str, tmp_path: Path) -> None:
    guard = RouteGuard(mode)
    trainer = make(get_peft_model(tiny(), lora()), tmp_path, guard)
    trainer.model.add_adapter("late", lora())
    trainer.model.set_adapter("late")
    if mode in ("freeze", "anchor"):
        with pytest.raises(ValueError, match=rf"\.late\.weight .* is not held by {mode}: .*guard\.attach\(trainer\)"):
            trainer.train()
        assert trainer.state.global_step == 0
        guard.detach()
        guard.attach(trainer)
    before = added_factors(trainer.model, "q_proj")
    trainer.train()
    if mode == "freeze":
        assert_same(before, added_factors(trainer.model, "q_proj"))
        assert all(bool(value.any()) for value in added_factors(trainer.model, "v_proj").values())
    else:
        assert_moved(before, added_factors(trainer.model, "q_proj"))
        assert min(drifts(trainer)) > 0


def test_an_adapter_elsewhere_or_at_rest_may_come_late(tmp_path: Path) -> None:
    trainer = make(get_peft_model(tiny(), lora()), tmp_path, RouteGuard())
    trainer.model.add_adapter("resting", lora())
    trainer.model.add_adapter("late", LoraConfig(r=2, target_modules=["v_proj"]))
    trainer.model.set_adapter("late")
    trainer.train()
    assert trainer.state.global_step == 4
    assert all(bool(value.any()) for value in added_factors(trainer.model, "v_proj").values())
