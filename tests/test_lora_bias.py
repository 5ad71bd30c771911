"""LoRA whose B has a bias of its own (`lora_bias=True`): held, measured and restored beside B's weight."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from routeguard import find_routes, freeze, track
from routeguard.checkpoint.adapter_tensors import spelled
from routeguard.checkpoint.restore import restore_checkpoint
from routeguard.checkpoint.verify import verify_checkpoint
from tests.test_verify_checkpoint import keep
from tests.tuned import tune, values
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = {"llama/bias": ["q_proj", "k_proj", "v_proj"], "gpt2": ["c_attn"]}


def with_bias(case: str, rank: int) -> Any:
    torch.manual_seed(0)
    return get_peft_model(build(case), LoraConfig(r=rank, lora_alpha=8, lora_bias=True, target_modules=MODELS[case]))


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("tail", ["weight", "bias"])
def test_a_file_spells_it_without_the_adapter(part: str, tail: str) -> None:
    assert spelled(f"q_proj.{part}.{tail}") == f"q_proj.{part}.{tail}"
    assert spelled(f"q_proj.{part}.default.{tail}") == f"q_proj.{part}.{tail}"


RESTORED = [
    ("llama/bias", "base", "fresh"),
    ("llama/bias", "run", "fresh"),
    ("llama/bias", "run", "trained"),
    ("gpt2", "base", "fresh"),
    ("gpt2", "run", "fresh"),
]


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(("case", "against", "start"), RESTORED)
def test_it_goes_back_on_disk(case: str, against: str, start: str, rank: int, tmp_path: Path) -> None:
    build(case).save_pretrained(tmp_path / "base")
    model = with_bias(case, rank)
    if start == "trained":
        tune(model, seed=5)
    model.save_pretrained(tmp_path / "start")
    keep(model, tmp_path / "run")
    assert verify_checkpoint(tmp_path / "start", tmp_path / against).ok
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    changed = {check.tensor for check in verify_checkpoint(tmp_path / "tuned", tmp_path / against).mismatches}
    assert any(name.endswith("lora_B.bias") for name in changed)
    restore_checkpoint(tmp_path / against, tmp_path / "tuned", out=tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out", tmp_path / against).ok
    first, found = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("start", "out"))
    queries = slice(0, 32) if case == "gpt2" else slice(None)
    names = [name for name in found if "lora_B" in name and "v_proj" not in name]
    assert names and all(torch.equal(found[name][queries], first[name][queries]) for name in names)


@pytest.mark.parametrize("case", MODELS)
def test_freeze_holds_it(case: str) -> None:
    model = with_bias(case, 4)
    frozen = freeze(model, find_routes(model))
    held = [held for held in (*frozen.whole, *frozen.rows) if held.name.endswith("lora_B.default.bias")]
    assert len(held) == sum("lora_B.default.bias" in name and "v_proj" not in name for name in values(model))
    if case == "llama/bias":
        assert not any(piece.trainable for piece in held)


@pytest.mark.parametrize("start", ["fresh", "trained"])
@pytest.mark.parametrize("case", MODELS)
def test_its_drift_is_that_of_the_merged_model(case: str, start: str) -> None:
    model = with_bias(case, 4)
    if start == "trained":
        tune(model, seed=5, size=1e-3)
    meter = track(model, find_routes(model))
    plain = copy.deepcopy(model).merge_and_unload()
    reference = track(plain, find_routes(plain))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default.bias" in name:
                parameter += 0.1
        for (name, parameter), moved in zip(
            plain.named_parameters(), copy.deepcopy(model).merge_and_unload().parameters(), strict=True
        ):
            assert name.endswith("bias") or torch.allclose(parameter, moved)
            parameter.copy_(moved)
    meter.measure(1)
    reference.measure(1)
    found, expected = meter.read()[0].factors, reference.read()[0].factors
    assert min(found.values()) > 0
    assert found == pytest.approx(expected, rel=0.02)  # it is relative to the base, which a trained start is not quite
