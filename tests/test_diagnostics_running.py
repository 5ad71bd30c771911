"""What a measurement leaves behind: nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from routeguard.diagnostics.distance import attention_distance
from routeguard.diagnostics.gradient import gradient_locality
from routeguard.diagnostics.importance import head_importance, layer_importance
from routeguard.diagnostics.routing_picture import attention_map
from routeguard.diagnostics.running import chosen_attention, quiet
from tests.zoo.build import build
from tests.zoo.case import text

LONG, SHORT = torch.arange(56).view(1, 56) % 60 + 10, torch.arange(20).view(1, 20) + 10
MEASUREMENTS: dict[str, Callable[[nn.Module], Any]] = {
    "distance": lambda model: attention_distance(model, LONG, num_queries=8, insist=True),
    "gradient": lambda model: gradient_locality(model, LONG, num_queries=8, insist=True),
    "map": lambda model: attention_map(model, LONG, layer=0, head=0, insist=True),
    "layers": lambda model: layer_importance(model, lambda m: float(m(LONG).logits.sum())),
    "heads": lambda model: head_importance(model, lambda m: float(m(LONG).logits.sum()), layers=[0]),
}


def dynamic() -> nn.Module:
    """A model whose rotary embedding adapts to the longest input it has seen."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return build(text("llama/dynamic", max_position_embeddings=16, rope_parameters=rope))


def state(model: Any) -> tuple[Any, ...]:
    rotary = model.model.rotary_emb
    return rotary.inv_freq.clone(), int(rotary.max_seq_len_cached), set(vars(rotary)), set(rotary._buffers)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_dynamic_rotary_embedding_stays(name: str) -> None:
    model = dynamic()
    frequencies, *before = state(model)
    with torch.no_grad():
        expected = dynamic()(SHORT).logits
        model(LONG)  # positive control: what an unguarded pass does
        assert not torch.equal(state(model)[0], frequencies)
        model = dynamic()
        MEASUREMENTS[name](model)
        after, *rest = state(model)
        assert torch.equal(after, frequencies) and rest == before
        assert torch.equal(model(SHORT).logits, expected)


def test_random_states_stay() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    seed()
    expected, model = draw(), build("lfm2")
    seed()
    layer_importance(model, lambda _: sum(draw()))
    assert draw() == expected


def test_modes_and_gradients() -> None:
    model = build("lfm2").train()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            with quiet(model):
                assert torch.is_grad_enabled() is enabled and not any(m.training for m in model.modules())
            assert torch.is_grad_enabled() is enabled and all(m.training for m in model.modules())


@pytest.mark.parametrize("name", ["distance", "gradient", "map"])
def test_lengths_beyond_the_positions_are_refused(name: str) -> None:
    model = build(text("llama/short", max_position_embeddings=32))
    layer = chosen_attention(model, None)[0].layer
    measure: dict[str, Callable[..., Any]] = {
        "distance": lambda ids, **options: attention_distance(model, ids, num_queries=8, **options),
        "gradient": lambda ids, **options: gradient_locality(model, ids, num_queries=8, **options),
        "map": lambda ids, **options: attention_map(model, ids, layer=layer, head=0, **options),
    }
    measure[name](LONG[:, :32])
    with pytest.raises(ValueError, match="33 tokens are beyond the 32 positions"):
        measure[name](LONG[:, :33])
    measure[name](LONG[:, :33], insist=True)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    model: Any = build("lfm2")
    size = model.get_input_embeddings().num_embeddings
    attention_distance(model, torch.full((1, 20), size - 1), num_queries=8)
    with pytest.raises(ValueError, match=f"token {size} is not one of this model's {size}"):
        attention_distance(model, torch.full((1, 20), size), num_queries=8)
