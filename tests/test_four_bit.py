"""4-bit weights that a CPU packs anew for evaluation: not under a guard, and not taken for a move where they are."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from routeguard import RouteGuard, Track, find_routes, freeze
from routeguard.training.stillness import Stillness, fingerprint
from tests.loops import tiny
from tests.test_guard_peft import on_quantised
from tests.trainers import dataset, make, parameters, run

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")
packs = pytest.mark.skipif(
    not getattr(bitsandbytes.functional, "has_avx512bf16", lambda: False)(),
    reason="this CPU has no bf16 instructions, or this version packs nothing",
)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "trainer_options": {"eval_dataset": dataset(4)}}


def qlora(folder: Path) -> nn.Module:
    """Adapters on the values: the quantised queries and keys are what a guard holds. Sizes that can be packed."""
    config = copy.deepcopy(tiny().config)
    config.hidden_size = 64
    torch.manual_seed(0)
    type(tiny())(config).save_pretrained(folder)
    return on_quantised(folder, 4, target_modules=["v_proj"])


def packed(model: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False)
    ]


def pack(layer: nn.Module) -> None:
    layer.weight.data, _ = bitsandbytes.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )


@packs
@pytest.mark.parametrize("mode", ["freeze", "track"])
def test_evaluating_a_guarded_run_packs_nothing(mode: str, tmp_path: Path) -> None:
    guard = RouteGuard(mode)
    trainer = run(qlora(tmp_path / "base"), tmp_path / "a", guard, **EVALUATED)
    assert not packed(trainer.model)
    plain = run(qlora(tmp_path / "base"), tmp_path / "b", RouteGuard(mode))
    after, without = parameters(trainer), parameters(plain)
    assert all(torch.equal(value, without[name]) for name, value in after.items())
    guard.detach()
    trainer.evaluate()
    assert packed(trainer.model)  # the model is as it would be without a guard


@packs
def test_the_control_evaluating_an_unguarded_run_packs_and_changes_it(tmp_path: Path) -> None:
    trainer = run(qlora(tmp_path / "base"), tmp_path / "a", **EVALUATED)
    assert packed(trainer.model)
    plain = run(qlora(tmp_path / "base"), tmp_path / "b")
    lora = {name: value for name, value in parameters(plain).items() if "lora_" in name}
    assert any(not torch.equal(value, parameters(trainer)[name]) for name, value in lora.items())


@packs
def test_a_base_packed_before_the_guard_is_warned_about_and_is_not_called_moved(tmp_path: Path) -> None:
    model = qlora(tmp_path / "base")
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert packed(model)
    trainer = make(model.train(), tmp_path / "a", RouteGuard(), save_strategy="steps", save_steps=2)
    with pytest.warns(UserWarning, match="was packed for inference when the model was evaluated"):
        trainer.train()
    assert not packed(model)  # saving has unpacked it
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(qlora(tmp_path / "base"), tmp_path / "b", RouteGuard(Track()))
    assert not any("packed for inference" in str(w.message) for w in seen)


@pytest.mark.parametrize("repacked", [False, True])
def test_a_changed_entry_is_found_in_either_layout(repacked: bool, tmp_path: Path) -> None:
    model = qlora(tmp_path / "base")
    frozen = freeze(model, find_routes(model))
    (held, *_) = frozen.before
    layer = model.get_submodule(held.name.removesuffix(".weight"))
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    still = Stillness(frozen)
    plain = held.parameter.data.clone()
    if repacked:
        pack(layer)
        assert fingerprint(held.parameter.data) != fingerprint(plain)  # what would be called a move
    still.check()
    with torch.no_grad():
        held.parameter.data.view(-1)[5] ^= 0x10  # one 4-bit entry
    with pytest.raises(RuntimeError, match="changed all the same"):
        still.check()


def test_equal_and_opposite_changes_of_codes_are_found() -> None:
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4").to("cpu")
    layer(torch.ones(1, 64))
    before = fingerprint(layer.weight)
    entries = layer.weight.data.view(-1)
    entries[0], entries[1] = 0x34, 0x34
    level = fingerprint(layer.weight)
    entries[0], entries[1] = 0x33, 0x35  # their sum is as before
    assert before != level != fingerprint(layer.weight)
    entries[0], entries[1] = 0x35, 0x33  # another order
    swapped = fingerprint(layer.weight)
    entries[0], entries[1] = 0x33, 0x35
    assert swapped == fingerprint(layer.weight)
