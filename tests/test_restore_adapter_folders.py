"""PEFT adapter folders restored on disk: equal to the restore in memory, every other byte as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from routeguard import find_routes
from routeguard.checkpoint.in_place import undo_restore
from routeguard.checkpoint.restore import restore_checkpoint
from routeguard.checkpoint.verify import verify_checkpoint
from routeguard.restoration.in_memory import restore
from tests.folders import snapshot
from tests.test_restore_adapters import wrapped
from tests.test_verify_checkpoint import keep
from tests.tuned import tune
from tests.zoo.build import build

pytestmark = [
    pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
ADAPTER = "adapter_model.safetensors"


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / ADAPTER)


def assert_equals_memory(model: Any, reference: Any, out: Path, scratch: Path, **options: Any) -> None:
    """The file in `out` is the one that PEFT saves after the restore in memory."""
    restore(model, reference, **options)
    model.save_pretrained(scratch)
    expected, found = stored(scratch), stored(out)
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, different


@pytest.mark.parametrize("against", ["base", "run"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt2", "phi3", "lfm2"])
def test_an_adapter_is_taken_off_the_routes_as_in_memory(
    name: str, options: dict[str, Any], against: str, tmp_path: Path
) -> None:
    plain, start, model = wrapped(name, **options)
    plain.save_pretrained(tmp_path / "base")
    keep(start, tmp_path / "run")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    before = snapshot(tmp_path / "tuned")
    report = restore_checkpoint(tmp_path / against, tmp_path / "tuned", out=tmp_path / "out")
    after = snapshot(tmp_path / "out")
    assert snapshot(tmp_path / "tuned") == before
    assert {file for file in before if before[file] != after[file]} == {ADAPTER}
    assert report.restored.changed_bytes > 0 and "of an adapter" in report.restored.method
    reference = plain if against == "base" else start
    assert_equals_memory(model, reference, tmp_path / "out", tmp_path / "memory")
    assert verify_checkpoint(tmp_path / "out", tmp_path / "run").ok
    assert not verify_checkpoint(tmp_path / "tuned", tmp_path / "run").ok
    restore_checkpoint(tmp_path / against, tmp_path / "tuned", in_place=True)
    assert snapshot(tmp_path / "tuned")[ADAPTER] == after[ADAPTER]
    undo_restore(tmp_path / "tuned")
    assert snapshot(tmp_path / "tuned") == before


def test_rows_beside_the_routes_stay(tmp_path: Path) -> None:
    """qwen3_next's q_proj also holds the output gate: its rows of B are not routing."""
    plain, _, model = wrapped("qwen3_next")
    plain.save_pretrained(tmp_path / "base")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    name = next(n for n in stored(tmp_path / "out") if "q_proj.lora_B" in n)
    old, new = stored(tmp_path / "tuned")[name], stored(tmp_path / "out")[name]
    (route,) = find_routes(plain, roles=("query",))
    held = torch.zeros(len(old), dtype=torch.bool)
    for begin, end in route.rows or ():
        held[begin:end] = True
    assert held.any() and not held.all()
    assert not new[held].any() and torch.equal(new[~held], old[~held]) and old[held].any()


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal"])
def test_an_adapter_that_did_not_start_at_zero_needs_its_initial_tensors(init: str, tmp_path: Path) -> None:
    plain, start, model = wrapped("llama", init_lora_weights=init)
    plain.save_pretrained(tmp_path / "base")
    keep(start, tmp_path / "run")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match=r"did not start at zero.*what the guard kept"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    restore_checkpoint(tmp_path / "run", tmp_path / "tuned", out=tmp_path / "out")
    assert_equals_memory(model, start, tmp_path / "out", tmp_path / "memory")


def test_part_of_an_adapter_that_did_not_start_at_zero_is_refused(tmp_path: Path) -> None:
    _, start, model = wrapped("qwen3_next", init_lora_weights="olora")
    keep(start, tmp_path / "run")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match="is routing in part"):
        restore_checkpoint(tmp_path / "run", tmp_path / "tuned", out=tmp_path / "out")


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_interpolation_shrinks_the_update(name: str, tmp_path: Path) -> None:
    from routeguard import Interpolate

    plain, _, model = wrapped(name)
    plain.save_pretrained(tmp_path / "base")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    method = Interpolate(0.3)
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", method=method)
    assert_equals_memory(model, plain, tmp_path / "out", tmp_path / "memory", method=method)
    with pytest.raises(ValueError, match="QK-Pro needs whole weights: merge"):
        restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "other", method="qk_pro")


def test_whole_copies_and_biases_go_back(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = build("llama/bias")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["k_proj"], bias="lora_only")
    model = peft.get_peft_model(copy.deepcopy(base), config)
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert_equals_memory(model, base, tmp_path / "out", tmp_path / "memory")


def test_what_has_no_known_start_or_does_not_touch_routing_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    other = peft.get_peft_model(copy.deepcopy(base), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    other.save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match=r"IA3 adapter acts on .*its start is not known"):
        restore_checkpoint(tmp_path / "base", tmp_path / "ia3", out=tmp_path / "out")
    elsewhere = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["up_proj"]))
    elsewhere.save_pretrained(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"nothing in .* acts on the 8 routes"):
        restore_checkpoint(tmp_path / "base", tmp_path / "elsewhere", out=tmp_path / "out")
    build("lfm2").save_pretrained(tmp_path / "lfm2")
    _, _, model = wrapped("llama")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match=r"is not the base of this adapter: .*layers\.0\.self_attn.*no such weight"):
        restore_checkpoint(tmp_path / "lfm2", tmp_path / "tuned", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_repeated_layers_needs_what_the_guard_kept(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "k_proj", "v_proj"]
    config = LoraConfig(r=2, target_modules=targets, layer_replication=[[0, 1], [0, len(model.model.layers)]])
    repeated = get_peft_model(model, config)
    keep(repeated, tmp_path / "run")
    tune(repeated)
    repeated.save_pretrained(tmp_path / "tuned")
    for check in (
        lambda: verify_checkpoint(tmp_path / "tuned", tmp_path / "base"),
        lambda: restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match="layer_replication"):
            check()
    restore_checkpoint(tmp_path / "run", tmp_path / "tuned", out=tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out", tmp_path / "run").ok


def test_experts_with_two_adapters_one_inside_the_other(tmp_path: Path) -> None:
    """PEFT's "all-linear" adapts both tensors of a layer's experts: `experts.lora_A`, `experts.base_layer.lora_A`."""
    plain = build("qwen3_next")
    plain.save_pretrained(tmp_path / "base")
    model = get_peft_model(copy.deepcopy(plain), LoraConfig(r=4, target_modules="all-linear"))
    keep(copy.deepcopy(model), tmp_path / "run")
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    experts = {name: values for name, values in stored(tmp_path / "tuned").items() if ".experts." in name}
    assert any("experts.base_layer.lora_A" in name for name in experts)
    assert any("experts.lora_A" in name for name in experts)
    bad = verify_checkpoint(tmp_path / "tuned", tmp_path / "run")
    assert not bad.ok and "how far" not in str(bad)  # the drift of an adapter cannot be read from its folder
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out", tmp_path / "run").ok
    assert all(torch.equal(stored(tmp_path / "out")[name], values) for name, values in experts.items())
