"""AdaLoRA: singular values between A and B, of which only they start at zero. It is guarded as a whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from torch import Tensor, nn

from routeguard import RouteGuard, find_routes, restore, track
from routeguard.drift.record import read_drift
from routeguard.protect.held import held_parameters
from tests.loops import tiny
from tests.test_peft_matrix import MODES
from tests.trainers import run
from tests.tuned import tune

pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(case: str = "llama", targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")) -> Any:
    torch.manual_seed(0)
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=list(targets))
    return get_peft_model(tiny(case), config).train()


def deltas(model: nn.Module) -> dict[str, Tensor]:
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_E")}
    return {name: layer.get_delta_weight("default").detach().clone() for name, layer in layers.items()}


@pytest.mark.parametrize("mode", [*MODES, "l2_sp"])
def test_modes(mode: str, tmp_path: Path) -> None:
    model = adapted()
    guard = RouteGuard("l2_sp") if mode == "l2_sp" else MODES[mode]()
    run(model, tmp_path, guard)
    after = deltas(model)
    assert all(delta.any() for name, delta in after.items() if "v_proj" in name)
    still = [not delta.any() for name, delta in after.items() if "v_proj" not in name]
    assert all(still) if mode in ("freeze", "restored") else not any(still)
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    assert all((drift > 0) == (mode != "freeze") for drift in samples[-1].factors.values())


def test_it_is_restored_in_memory_from_its_start_only(tmp_path: Path) -> None:
    start = adapted()
    start.save_pretrained(tmp_path)
    for reference in (start, tmp_path):
        model = copy.deepcopy(start)
        tune(model)
        restore(model, reference)
        assert all(delta.any() == ("v_proj" in name) for name, delta in deltas(model).items())
    with pytest.raises(ValueError, match=r"start of .*q_proj\.lora_[ABE]\.default is not known from the base weights"):
        restore(model, tiny("llama"))


def test_a_plain_loop_measures_it() -> None:
    model = adapted()
    meter = track(model, find_routes(model))
    tune(model)
    meter.measure(1)
    assert all(drift > 0 for drift in meter.read()[0].factors.values())


def test_on_a_fused_tensor_it_is_refused() -> None:
    model = adapted("phi3", ("qkv_proj",))
    with pytest.raises(ValueError, match=r"its adapter \(lora_A\) mixes rows; use LoRA there"):
        held_parameters(model, find_routes(model))
