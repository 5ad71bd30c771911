"""Gradient against distance: finite differences of the loss by single attention logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from routeguard.diagnostics.gradient import gradient_locality
from routeguard.diagnostics.query_sample import sample_queries
from routeguard.diagnostics.running import chosen_attention
from tests.attention_reference import sharpened
from tests.zoo.build import build, example_inputs

NUDGES: dict[int, Tensor] = {}  # layer: [B, H, T, T] added to the scaled products


def nudged(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Plain attention, written apart from the library, whose scaled products can be moved one by one."""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    products = query @ keys.transpose(2, 3) * kwargs["scaling"]
    if module.layer_idx in NUDGES:
        products = products + NUDGES[module.layer_idx]
    cap = kwargs.get("softcap")
    logits = products if cap is None else cap * torch.tanh(products / cap)
    logits = logits + attention_mask
    sinks = getattr(module, "sinks", None)
    if sinks is None:
        weights = logits.softmax(-1)
    else:
        column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    return (weights @ values).transpose(1, 2), weights


AttentionInterface.register("nudged", nudged)
AttentionMaskInterface.register("nudged", eager_mask)


def losses_of(model: Any, input_ids: Tensor) -> Tensor:
    """The loss of each sequence: [B]."""
    with torch.no_grad():
        logits = model(input_ids=input_ids, use_cache=False).logits
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
    return losses.mean(-1)


@pytest.mark.parametrize("name", ["lfm2", "gemma2", "gpt_oss", "qwen3"])
def test_every_distance_agrees_with_finite_differences(name: str) -> None:
    model, tokens, heads, step = sharpened(build(name)).double(), 8, 4, 1e-2
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    input_ids = example_inputs(name)["input_ids"][:, :tokens]
    model.set_attn_implementation("nudged")
    layer = chosen_attention(model, None)[-1].layer
    measured = gradient_locality(model, input_ids, num_queries=None, layers=[layer], chunk_tokens=3)
    assert measured.loss == pytest.approx(float(losses_of(model, input_ids)), rel=1e-5)

    places = [(head, query, key) for head in range(heads) for query in range(tokens) for key in range(query + 1)]
    sides = []
    for sign in (1, -1):
        NUDGES[layer] = torch.zeros(len(places), heads, tokens, tokens, dtype=torch.float64)
        for number, place in enumerate(places):
            NUDGES[layer][(number, *place)] = sign * step
        sides.append(losses_of(model, input_ids.expand(len(places), -1)))
    NUDGES.clear()
    slopes = ((sides[0] - sides[1]) / (2 * step)).abs().tolist()
    expected = np.zeros(tokens)
    for slope, (_, query, key) in zip(slopes, places, strict=True):
        expected[query - key] += slope / (heads * (tokens - query + key))
    np.testing.assert_allclose(measured.curve(layer).values, expected, rtol=5e-3, atol=1e-8)
    assert expected[:-1].max() > 1.5 * expected[:-1].min() > 0  # the last query predicts nothing; all else differs


def test_sampled_queries_are_a_part_of_all_and_paths_agree() -> None:
    model = sharpened(build("lfm2"))
    input_ids = example_inputs("lfm2", num_tokens=48)["input_ids"]
    full = gradient_locality(model, input_ids, num_queries=None)
    sampled = gradient_locality(model, input_ids, num_queries=8, seed=1)
    positions = np.array(sample_queries(48, 8, seed=1).all_positions)
    expected = [4 * int((positions >= lag).sum()) for lag in range(48)]
    assert sampled.curve(2).counts[0].tolist() == expected
    assert full.curve(2).counts[0].tolist() == [4 * (48 - lag) for lag in range(48)]
    assert (sampled.curve(5).sums <= full.curve(5).sums + 1e-9).all()
    model.set_attn_implementation("sdpa")
    other = gradient_locality(model, input_ids, num_queries=None)
    np.testing.assert_allclose(other.pooled.values, full.pooled.values, rtol=1e-3, atol=1e-8)


def test_frozen_adapted_and_training_models_are_left_as_they_were() -> None:
    input_ids = example_inputs("lfm2")["input_ids"]
    free = sharpened(build("lfm2"))
    expected = gradient_locality(free, input_ids).pooled.values
    frozen = sharpened(build("lfm2")).train().requires_grad_(False)
    with torch.no_grad():
        measured = gradient_locality(frozen, input_ids)
    np.testing.assert_allclose(measured.pooled.values, expected, rtol=1e-5)
    for model in (free, frozen):
        assert all(parameter.grad is None for parameter in model.parameters())
    assert frozen.training and not any(parameter.requires_grad for parameter in frozen.parameters())


def test_only_labelled_tokens_count() -> None:
    model = sharpened(build("lfm2"))
    input_ids = example_inputs("lfm2")["input_ids"]
    labels = torch.full_like(input_ids, -100)
    labels[0, 6] = input_ids[0, 6]
    curve = gradient_locality(model, input_ids, labels=labels, num_queries=None, layers=[5]).curve(5)
    # The last attention layer is followed by position-wise layers only: query 5 alone matters to token 6.
    assert (curve.values[:6] > 0).all() and (curve.values[6:] == 0).all()
    with pytest.raises(ValueError, match="no label of a sequence counts"):
        gradient_locality(model, input_ids, labels=torch.full_like(input_ids, -100))
    with pytest.raises(ValueError, match="must both be"):
        gradient_locality(model, input_ids, labels=labels[:, :3])
    with pytest.raises(ValueError, match=r"measured: \[5\]"):
        gradient_locality(model, input_ids, layers=[5]).curve(2)


def test_a_softmax_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        gradient_locality(build("bloom"), example_inputs("bloom")["input_ids"])
