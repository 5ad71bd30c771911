"""Restore inside PEFT adapters: the routed weight must act as it did before training, and nothing else may change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from routeguard.protect.held import held_parameters
from routeguard.protect.modes import Interpolate
from routeguard.restoration.in_memory import restore, restored
from routeguard.restoration.reference import capture_reference, save_reference
from routeguard.routes.find import find_routes
from tests.tuned import assert_same, tune, values
from tests.zoo.build import build, example_inputs

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

TARGETS = {
    "lfm2": ["q_proj", "k_proj", "w1"],
    "llama": ["q_proj", "k_proj", "up_proj"],
    "qwen3_next": ["q_proj", "k_proj"],
    "phi3": ["qkv_proj"],
    "gpt2": ["c_attn"],
}


def wrapped(name: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any]:
    """(plain base, PEFT model at its start, PEFT model after tuning)."""
    base = build(name).to(dtype)
    plain = copy.deepcopy(base)
    config = peft.LoraConfig(
        r=4, target_modules=TARGETS[name], task_type="CAUSAL_LM", fan_in_fan_out=name == "gpt2", **options
    )
    start = peft.get_peft_model(base, config).eval()
    tuned = copy.deepcopy(start)
    tune(tuned)
    return plain, start, tuned


def effective(model: Any) -> list[Tensor]:
    """The rows of every route as the model applies them, by merging a copy of it."""
    routes = find_routes(model)
    weights = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    merged = []
    for route in routes:
        weight = weights[route.parameter.replace("base_model.model.", "").replace(".base_layer", "")].detach()
        rows = route.rows or ((0, route.shape[route.dim]),)
        merged.append(torch.cat([weight.narrow(route.dim, a, b - a) for a, b in rows], route.dim))
    return merged


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def logits(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        return model(**example_inputs(name)).logits


@pytest.mark.parametrize("reference", ["start", "plain"])
@pytest.mark.parametrize("name", TARGETS)
def test_lora_acts_as_at_its_start(name: str, reference: str) -> None:
    plain, start, model = wrapped(name)
    routes = find_routes(model)
    source = start if reference == "start" else plain
    moved, first, before = effective(model), effective(start), values(model)
    report = restore(model, source)
    assert all_equal(effective(model), first)
    for route, tuned, at_start in zip(routes, moved, first, strict=True):
        assert torch.equal(tuned, at_start) == (route.kind == "bias")  # biases are frozen, weights moved
    held = {piece.name: piece for piece in held_parameters(model, routes)}
    assert_same(model, {**before, **{n: p.detach() for n, p in model.named_parameters() if n in held}})
    assert all(value > 0.1 for layer in report.layers for value in layer.drift_before.values())
    for piece in held.values():  # rows beside the held ones, and an A that they share, stay as tuned
        if piece.rows is not None:
            free = torch.ones(piece.parameter.shape[0], dtype=torch.bool)
            for begin, end in piece.rows:
                free[begin:end] = False
            assert torch.equal(piece.parameter[free], before[piece.name][free])
            a = piece.name.replace("lora_B", "lora_A")
            assert torch.equal(dict(model.named_parameters())[a], before[a])


def test_restoring_every_adapter_gives_the_base_logits() -> None:
    base = build("llama")
    plain = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"])).eval()
    tune(model)
    assert not torch.allclose(logits(model, "llama"), logits(plain, "llama"), atol=1e-3)
    with restored(model, plain):
        torch.testing.assert_close(logits(model, "llama"), logits(plain, "llama"))
    assert not torch.allclose(logits(model, "llama"), logits(plain, "llama"), atol=1e-3)


def test_drift_of_an_adapter_is_that_of_its_merged_weight() -> None:
    for options in ({}, {"use_rslora": True}, {"init_lora_weights": "pissa"}):
        _, start, model = wrapped("llama", **options)
        routes = find_routes(model)
        plain = {
            (route.layer, route.role): ((tuned - first).norm() / first.norm()).item()
            for route, tuned, first in zip(routes, effective(model), effective(start), strict=True)
        }
        report = restore(model, start)
        got = {(at.layer, role): value for at in report.layers for role, value in at.drift_before.items()}
        assert got == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("reference", ["start", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt2"])
def test_dora_gets_its_first_magnitude_back(name: str, dtype: torch.dtype, reference: str) -> None:
    plain, start, model = wrapped(name, dtype=dtype, use_dora=True)
    held = {p.name: p for p in held_parameters(model, find_routes(model)) if p.part == "magnitude"}
    assert held and not any(torch.equal(p.parameter, dict(start.named_parameters())[n]) for n, p in held.items())
    before = values(model)
    restore(model, start if reference == "start" else plain)
    for name_, piece in held.items():
        first = dict(start.named_parameters())[name_]
        rows = piece.rows or ((0, first.shape[0]),)
        expected = before[name_].clone()
        for begin, end in rows:
            expected[begin:end] = first[begin:end]
        assert torch.equal(piece.parameter, expected)


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal", False])
def test_an_adapter_that_did_not_start_at_zero_needs_its_initial_tensors(init: Any) -> None:
    plain, start, model = wrapped("llama", init_lora_weights=init)
    tuned = values(model)
    with pytest.raises(ValueError, match=r"did not start at zero .* lacks its initial tensors.* what the guard kept"):
        restore(model, plain)
    assert_same(model, tuned)
    restore(model, start)
    first = values(start)
    for piece in held_parameters(model, find_routes(model)):
        assert torch.equal(piece.parameter, first[piece.name])
    assert all_equal(effective(model), effective(start))


def test_rows_of_an_adapter_that_did_not_start_at_zero_cannot_be_restored_alone() -> None:
    _, start, model = wrapped("qwen3_next", init_lora_weights="pissa")
    tuned = values(model)
    with pytest.raises(ValueError, match=r"held in part, its adapter did not start at zero and lora_A has moved"):
        restore(model, start)
    assert_same(model, tuned)
    first = dict(start.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.copy_(first[name])
    restore(model, start)  # with A where it was, the rows of B are enough
    assert all_equal(effective(model), effective(start))


def test_what_a_guard_kept_and_adapter_files_serve_as_reference(tmp_path: Path) -> None:
    for options in ({}, {"use_dora": True}, {"init_lora_weights": "olora"}):
        _, start, model = wrapped("llama", **options)
        reference = capture_reference(start, held_parameters(start, find_routes(start)), origin="step 0")
        save_reference(reference, tmp_path / "run" / "routeguard" / "reference.safetensors")
        start.save_pretrained(tmp_path / "adapter")
        state = peft.get_peft_model_state_dict(start)
        first = values(start)
        for source in (tmp_path / "run", tmp_path / "adapter", state, reference):
            again = copy.deepcopy(model)
            restore(again, source)
            for piece in held_parameters(again, find_routes(again)):
                assert torch.equal(piece.parameter, first[piece.name]), (options, source)


def test_a_base_that_is_not_the_references_is_refused() -> None:
    _, _, model = wrapped("llama")
    other = build("llama", seed=5)
    tuned = values(model)
    with pytest.raises(ValueError, match=r"the weight under the adapter, .* is not that of the reference"):
        restore(model, other)
    assert_same(model, tuned)


def test_a_reference_that_carries_another_adapter_is_refused() -> None:
    _, start, _ = wrapped("llama")
    with pytest.raises(ValueError, match=r"carries an adapter on 'model.layers.0.self_attn.q_proj.weight'"):
        restore(build("llama"), start)


def test_merged_adapters_are_refused() -> None:
    plain, start, model = wrapped("llama")
    model.merge_adapter()
    tuned = values(model)
    with pytest.raises(ValueError, match=r"merged into 8 routed weights .*unmerge_adapter"):
        restore(model, start)
    assert_same(model, tuned)
    merged = model.merge_and_unload()
    restore(merged, plain)
    for route in find_routes(plain):
        weights = (dict(m.named_parameters())[route.parameter] for m in (merged, plain))
        assert torch.equal(*weights)


def test_a_merged_model_cannot_be_restored_from_the_start_of_adapters() -> None:
    _, start, model = wrapped("llama")
    reference = capture_reference(start, held_parameters(start, find_routes(start)), origin="step 0")
    with pytest.raises(ValueError, match=r"carries an adapter on 'model.layers.0.self_attn.q_proj.weight'"):
        restore(model.merge_and_unload(), reference)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "phi3"])
def test_interpolation_shrinks_the_update(name: str) -> None:
    plain, start, model = wrapped(name)
    first = effective(start)
    expected = [at_start + 0.75 * (tuned - at_start) for tuned, at_start in zip(effective(model), first, strict=True)]
    for source in (plain, start):
        again = copy.deepcopy(model)
        restore(again, source, method=Interpolate(alpha=0.25))
        torch.testing.assert_close(effective(again), expected, rtol=1e-4, atol=1e-6)


def test_methods_without_a_meaning_inside_an_adapter_are_refused() -> None:
    plain, start, model = wrapped("llama")
    with pytest.raises(ValueError, match="QK-Pro is not defined inside an adapter"):
        restore(model, plain, method="qk_pro")
    _, start, model = wrapped("llama", init_lora_weights="pissa")
    with pytest.raises(ValueError, match="did not start at zero, so ΔW cannot be shrunk"):
        restore(model, start, method="interpolate")


def test_other_adapters_need_their_initial_tensors() -> None:
    base = build("llama")
    plain = copy.deepcopy(base)
    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    start = peft.get_peft_model(base, config)
    model = copy.deepcopy(start)
    tune(model)
    with pytest.raises(ValueError, match=r"the start of .*ia3_l.* is not known from the base weights"):
        restore(model, plain)
    restore(model, start)
    first = values(start)
    for piece in held_parameters(model, find_routes(model)):
        assert torch.equal(piece.parameter, first[piece.name])
    assert not all(torch.equal(p, first[n]) for n, p in model.named_parameters())  # down_proj's vector stays tuned


def test_whole_copies_of_modules_are_restored() -> None:
    base = build("llama")
    plain = copy.deepcopy(base)
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], modules_to_save=["q_proj", "k_proj"])
    model = peft.get_peft_model(base, config)
    tune(model)
    routes = find_routes(model)
    assert all("modules_to_save" in route.parameter for route in routes)
    before = values(model)
    for source in (plain, plain.state_dict()):
        again = copy.deepcopy(model)
        restore(again, source)
        named, start = dict(again.named_parameters()), dict(plain.named_parameters())
        for name, parameter in named.items():
            original = name.replace("base_model.model.", "").replace("modules_to_save.default.", "")
            expected = start[original] if name in routes.parameters else before[name]
            assert torch.equal(parameter, expected)


def test_trained_biases_under_an_adapter_are_restored() -> None:
    base = build("gpt2")
    plain = copy.deepcopy(base)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only")
    start = peft.get_peft_model(base, config)
    model = copy.deepcopy(start)
    tune(model)
    for source in (plain, start):
        again = copy.deepcopy(model)
        restore(again, source)
        bias = again.base_model.model.transformer.h[0].attn.c_attn.base_layer.bias
        first = plain.transformer.h[0].attn.c_attn.bias
        assert torch.equal(bias[:128], first[:128]) and not torch.equal(bias[128:], first[128:])


def test_two_adapters_on_one_weight_both_go_back() -> None:
    base = build("llama")
    plain = copy.deepcopy(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"])
    model = peft.get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    model.base_model.set_adapter(["first", "second"])
    tune(model)
    restore(model, plain)
    for piece in held_parameters(model, find_routes(model)):
        assert piece.part == "lora_A" or not piece.parameter.any()
    assert {name.split(".")[-2] for name, _ in model.named_parameters() if "lora_B" in name} == {"first", "second"}


def test_quantised_bases_are_left_alone_and_their_adapters_restored() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    base = build("llama")
    plain = copy.deepcopy(base)
    for layer in base.model.layers:
        for name in ("q_proj", "k_proj"):
            old = getattr(layer.self_attn, name)
            new = bnb.nn.Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=torch.float32)
            new.weight = bnb.nn.Params4bit(old.weight.detach().clone(), requires_grad=False)
            setattr(layer.self_attn, name, new.to("cpu"))
    config = peft.LoraConfig(
        r=4, target_modules=[f"layers.{n}.self_attn.{m}" for n in (0, 1) for m in ("q_proj", "k_proj")]
    )
    start = peft.get_peft_model(base, config)
    model = copy.deepcopy(start)
    tune(model)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    dense = bnb.functional.dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state)
    moved = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    for source in (plain, start, plain.state_dict()):
        again = copy.deepcopy(model)
        packed = {n: p.detach().clone() for n, p in again.named_parameters() if not p.is_floating_point()}
        report = restore(again, source)
        assert any("4 routed base weights are quantised and carry no adapter" in note for note in report.notes)
        assert {layer.layer for layer in report.layers} == {0, 1}
        named = dict(again.named_parameters())
        assert packed and all(torch.equal(named[n], p) for n, p in packed.items())
        assert all(not p.any() for n, p in named.items() if "lora_B" in n)
        against = dense if source is start else plain.model.layers[0].self_attn.q_proj.weight
        expected = (moved.norm() / against.norm()).item()
        assert report.layers[0].drift_before["query"] == pytest.approx(expected, rel=1e-4) and expected > 0.1
