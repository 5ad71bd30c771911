"""Mean attention distance against full attention matrices, over architectures and attention functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from routeguard.diagnostics import distance as distance_module
from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.diagnostics.attention_rows import attention_rows, mean_distances
from routeguard.diagnostics.capture import captured_calls
from routeguard.diagnostics.distance import attention_distance
from routeguard.diagnostics.distance_change import distance_change
from routeguard.diagnostics.running import chosen_attention
from tests.attention_reference import full_distances, sharpened
from tests.zoo.build import build, example_inputs

# name: what it is here for
ARCHITECTURES = {
    "lfm2": "hybrid, grouped heads, query and key norms",
    "qwen3_next": "hybrid, output gate, partial rotary, norms",
    "gemma2": "soft cap, sliding layers between",
    "gpt_oss": "sinks",
    "qwen3": "query and key norms",
    "kimi_linear": "latent attention without positions",
    "nemotron_h": "grouped heads without rotary",
    "inkling_text": "position bias",
    "bloom": "its own softmax, no attention function",
    "gpt_neox": "fused projections, partial rotary",
    "granitemoehybrid": "scaling of its own",
    "hy_v4": "sinks and a sparse selection in the mask",
}


def sharp(name: str) -> tuple[Any, torch.Tensor]:
    return sharpened(build(name)), example_inputs(name)["input_ids"]


def worst_error(values: dict[int, torch.Tensor], full: dict[int, torch.Tensor]) -> float:
    assert values.keys() <= full.keys()
    errors = [(found - full[layer][0]).abs() / full[layer][0].clamp_min(0.01) for layer, found in values.items()]
    return max(float(error.max()) for error in errors)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_query_agrees_with_the_full_matrix(name: str) -> None:
    model, input_ids = sharp(name)
    measured = attention_distance(model, input_ids, num_queries=None, chunk_tokens=7)
    assert worst_error(dict(measured.values), full_distances(model, input_ids)) < 0.005
    spread = max(float(values.std()) for values in measured.values.values())
    assert spread > 0.5  # the heads do differ: agreement is not that of uniform attention


@pytest.mark.parametrize("name", ["granite_swa", "gpt_oss", "gemma2", "kimi_linear", "qwen3_next"])
def test_rows_times_values_are_what_the_attention_function_returns(name: str) -> None:
    """Also where returned weights are not all of it: granite_swa scales the output by its sinks."""
    model, input_ids = sharp(name)
    positions = [0, 5, 11, 23]
    errors = []

    def visit(call: AttentionCall, result: torch.Tensor | None) -> None:
        assert result is not None
        values = call.value.repeat_interleave(call.num_heads // call.value.shape[1], dim=1)
        found = attention_rows(call, positions) @ values
        errors.append(float((found - result[:, :, positions]).abs().max() / result.abs().max()))

    with torch.no_grad(), captured_calls(model, chosen_attention(model, None), visit):
        model(input_ids=input_ids, use_cache=False)
    assert errors and max(errors) < 1e-4


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"sinks": None}),
        ("granitemoehybrid", {"scaling": 0.1}),
        ("inkling_text", {"bias": None}),
        ("lfm2", {"mask": None}),
    ],
)
def test_each_part_of_the_call_matters(name: str, without: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def crippled(call: AttentionCall, positions: list[int], **options: Any) -> torch.Tensor:
        return mean_distances(replace(call, **without), positions, **options)

    monkeypatch.setattr(distance_module, "mean_distances", crippled)
    model, input_ids = sharp(name)
    measured = attention_distance(model, input_ids, num_queries=None)
    assert worst_error(dict(measured.values), full_distances(model, input_ids)) > 0.005


def no_mask_stand_in(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Gets what a flash kernel gets, no mask, and hides its probabilities the way one does."""
    assert attention_mask is None
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    steps = torch.arange(query.shape[2])
    gaps = steps[:, None] - steps
    window = kwargs.get("sliding_window") or len(steps)
    logits = (query @ keys.transpose(2, 3) * kwargs["scaling"]).masked_fill((gaps < 0) | (gaps >= window), -1e30)
    return (logits.exp() / logits.exp().sum(-1, keepdim=True) @ values).transpose(1, 2), None


AttentionInterface.register("no_mask_stand_in", no_mask_stand_in)
AttentionMaskInterface.register("no_mask_stand_in", flash_attention_mask)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "kimi_linear", "falcon/heads"])
def test_sdpa_and_flash_paths_give_what_eager_gives(name: str) -> None:
    model, input_ids = sharp(name)
    eager = attention_distance(model, input_ids, num_queries=None)
    functions = ["sdpa"] if name.startswith("falcon") else ["sdpa", "no_mask_stand_in"]  # falcon: direct SDPA calls
    for function in functions:
        model.set_attn_implementation(function)
        other = attention_distance(model, input_ids, num_queries=None, chunk_tokens=5)
        for layer, values in eager.values.items():
            torch.testing.assert_close(other.values[layer], values, rtol=1e-3, atol=1e-3)


def test_sliding_layers_too_when_a_window_comes_without_a_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 2, 40, 8, generator=generator), torch.randn(1, 1, 40, 8, generator=generator)
    call = AttentionCall(0, "", query, key, key, scaling=0.5, window=6)
    steps = torch.arange(40)
    gaps = steps[:, None] - steps
    logits = (query @ key.transpose(2, 3) * 0.5).masked_fill((gaps < 0) | (gaps >= 6), -torch.inf)
    expected = (logits.softmax(-1) * gaps).sum(-1)
    positions = list(range(40))
    torch.testing.assert_close(mean_distances(call, positions, chunk_tokens=8), expected)
    torch.testing.assert_close(attention_rows(call, [3, 17, 39]), logits.softmax(-1)[:, :, [3, 17, 39]])


def test_sampled_queries_are_those_of_the_full_computation() -> None:
    model, input_ids = sharp("lfm2")
    full, sampled = (attention_distance(model, input_ids, num_queries=n) for n in (None, 8))
    for layer, values in sampled.values.items():
        torch.testing.assert_close(values, full.values[layer][:, sampled.sample.all_positions])
    assert full.mean(2) == pytest.approx(full.values[2].mean(-1).tolist())
    assert torch.equal(full.interval(2).low, full.interval(2).high)
    assert bool((sampled.interval(2).low < sampled.interval(2).high).all())


def test_low_precision_queries_and_keys_are_computed_in_fp32() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, h, 64, 16, generator=generator).bfloat16() for h in (4, 2))
    steps = torch.arange(64)
    gaps = steps[:, None] - steps
    logits = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3)
    expected = (logits.masked_fill(gaps < 0, -torch.inf).softmax(-1) * gaps).sum(-1)
    found = mean_distances(AttentionCall(0, "", query, key, key), list(range(64)), chunk_tokens=16)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_far_positions_do_not_cancel() -> None:
    tokens = 1 << 18
    key = torch.zeros(1, 1, tokens, 2)
    key[0, 0, -3, 0] = 60.0
    query = torch.ones(1, 1, tokens, 2)
    found = mean_distances(AttentionCall(0, "", query, key, key), [tokens - 1])
    assert float(found) == pytest.approx(2.0, rel=1e-4)


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 4096, 8, generator=generator), torch.randn(1, 2, 4096, 8, generator=generator)
    call = AttentionCall(0, "", query, key, key)
    with LargestTensor() as largest:
        mean_distances(call, list(range(0, 4096, 128)), chunk_tokens=256)
    assert largest.elements <= 4 * 32 * 256
    with LargestTensor() as largest:
        attention_rows(call, list(range(4096)))
    assert largest.elements >= 4 * 4096 * 4096  # the check sees a T × T matrix where there is one


def test_tied_blocks_count_as_the_layers_that_use_them() -> None:
    model, input_ids = sharp("zamba")
    measured = attention_distance(model, input_ids, num_queries=None)
    assert measured.layers == (1, 3, 5)
    assert not torch.equal(measured.values[1], measured.values[3])
    narrowed = attention_distance(model, input_ids, num_queries=None, layers=[3])
    torch.testing.assert_close(narrowed.values[3], measured.values[3])


def test_adapters_and_several_sequences() -> None:
    from peft import LoraConfig, get_peft_model

    model, input_ids = sharp("lfm2")
    two = torch.cat([input_ids, input_ids.flip(1)])
    plain = attention_distance(model, two, num_queries=None)
    full = full_distances(model, two)
    for layer, values in plain.values.items():
        torch.testing.assert_close(values, full[layer].mean(0), rtol=1e-3, atol=1e-3)
    adapted = attention_distance(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), two, num_queries=None)
    for layer, values in plain.values.items():
        torch.testing.assert_close(adapted.values[layer], values)


def test_nothing_of_the_model_or_transformers_is_left_changed() -> None:
    model, input_ids = sharp("lfm2")
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    patched = dict(vars(AttentionInterface))
    state = torch.get_rng_state()
    attention_distance(model, input_ids)
    with pytest.raises(ValueError, match="give \\[sequences, tokens\\]"):
        attention_distance(model, input_ids[0])
    assert [module.training for module in model.modules()] == modes
    assert dict(vars(AttentionInterface)) == patched
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_errors_say_what_to_do() -> None:
    model, input_ids = sharp("lfm2")
    with pytest.raises(ValueError, match="8 or more"):
        attention_distance(model, input_ids, num_queries=4)
    with pytest.raises(ValueError, match="layer"):
        attention_distance(model, input_ids, layers=[0])
    with pytest.raises(ValueError, match=r"measured: \[2, 5\]"):
        attention_distance(model, input_ids).interval(3)

    def opaque(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    class Mask:
        shape = (1, 1)  # asked for by transformers before 5

    def flex_mask(*args: Any, **kwargs: Any) -> Any:
        return Mask()

    AttentionInterface.register("opaque", opaque)
    AttentionMaskInterface.register("opaque", flex_mask)
    model.set_attn_implementation("opaque")
    with pytest.raises(ValueError, match="a Mask for a mask cannot be read"):
        attention_distance(model, input_ids)
    model.model.layers[5].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"no attention call seen in layers \[5\]"):
        attention_distance(model, input_ids)


def test_change_ranks_layers_by_heads_that_shortened() -> None:
    model, input_ids = sharp("lfm2")
    before = attention_distance(model, input_ids, num_queries=None)
    shorter = {layer: values.clone() for layer, values in before.values.items()}
    shorter[2][0] *= 1.5
    shorter[2][1] *= 0.5
    shorter[5][:3] *= 0.9
    after = replace(before, values=shorter)
    change = distance_change({"before": before, "after": after, "restored": before})
    assert [(row.layer, row.shortened, row.surely_shortened) for row in change.ranking] == [(5, 3, 3), (2, 1, 1)]
    assert "3/4" in str(change) and "restored" in str(change)
    assert change.to_dict()["ranking"][0]["relative_change"] < 0
    with pytest.raises(ValueError, match="other queries"):
        distance_change({"before": before, "after": attention_distance(model, input_ids, num_queries=8)})
    with pytest.raises(ValueError, match="two states"):
        distance_change({"before": before})


def test_pictures_are_written(tmp_path: Any) -> None:
    model, input_ids = sharp("lfm2")
    before = attention_distance(model, input_ids, num_queries=8)
    before.plot(tmp_path / "one.png")
    distance_change({"before": before, "after": before}).plot(tmp_path / "made" / "two.png")
    assert (tmp_path / "one.png").stat().st_size > 5000 and (tmp_path / "made" / "two.png").exists()
