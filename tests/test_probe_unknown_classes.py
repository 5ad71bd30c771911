"""The autograd probe on attention that no library knows, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from routeguard.routes.probe import probe_routes
from tests.perturbation import perturbation_check
from tests.probed_rows import HEAD_DIM, HEADS, HIDDEN, bias, key, query, rows_of, value
from tests.zoo.build import build


class HandWritten(nn.Module):
    """Attention with raw [in, out] parameters and einsum, beside look-alikes with the same names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weights = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN) / 8)  # [k | q | v] columns
        self.router = nn.Linear(HIDDEN, 24, bias=False)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        k, q, v = ((hidden @ self.weights).unflatten(-1, (3, HEADS, HEAD_DIM))).unbind(-3)
        if self.kind == "linear":
            state = torch.einsum("bshk,bshv->bhkv", functional.softmax(k, dim=-1), v)
            mixed = torch.einsum("bthk,bhkv->bthv", functional.softmax(q, dim=-1), state)
        else:
            logits = torch.einsum("bshd,bthd->bhts", k, q * self.scale.exp()) / math.sqrt(HEAD_DIM)
            ahead = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            far = torch.ones_like(ahead).tril(-6 if self.kind == "window" else -999)
            mixed = torch.einsum("bhts,bshd->bthd", logits.masked_fill(ahead | far, float("-inf")).softmax(-1), v)
        experts = functional.softmax(self.router(hidden), dim=-1)  # as square as logits over 24 tokens
        return mixed.flatten(-2) * experts.amax(-1, keepdim=True)


class Unknown(nn.Module):
    """A decoder that no library knows."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden @ self.embed.weight.T


def test_unknown_class() -> None:
    torch.manual_seed(0)
    model = Unknown(HandWritten("linear"), HandWritten("full"), HandWritten("window"))
    result = probe_routes(model)
    assert [(block.module, block.layer, block.global_attention, block.reach_tokens) for block in result.blocks] == [
        ("blocks.1", 1, True, 23),
        ("blocks.2", 2, False, 5),
    ]
    for block in result.blocks:
        assert rows_of(block) == {
            "weights": (1, ((64, 128),), ((0, 64),), ((128, 192),), ()),
            "scale": query((0, 1)),
        }
    assert perturbation_check(model, result).agrees


class Fused(nn.Module):
    """Attention through torch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN // 2)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN // 2)
        self.position = nn.Parameter(torch.zeros(HEADS, 24))

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = self.position[:, None, :] + torch.full((24, 24), float("-inf")).triu(1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(-2)


def test_fused_attention_of_an_unknown_class() -> None:
    torch.manual_seed(0)
    model = Unknown(Fused())
    result = probe_routes(model)
    (block,) = result.blocks
    assert block.global_attention
    assert rows_of(block) == {
        "position": bias((0, 4)),
        "q_proj.weight": query((0, 64)),
        "q_proj.bias": query((0, 64)),
        "k_proj.weight": key((0, 32)),
        "k_proj.bias": key((0, 32)),
        "v_proj.weight": value((0, 32)),
        "v_proj.bias": value((0, 32)),
    }
    assert perturbation_check(model, result).agrees


class Twice(nn.Module):
    """Runs one attention block two times in a layer, so that its second input depends on its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = HandWritten("full")

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden + self.attention(hidden))


def test_a_block_that_runs_twice_does_not_list_its_values_as_queries() -> None:
    torch.manual_seed(0)
    (block,) = probe_routes(Unknown(Twice())).blocks
    assert block.module == "blocks.0.attention"
    assert rows_of(block)["weights"] == (1, ((64, 128),), ((0, 64),), ((128, 192),), ())


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden, hidden, hidden)[0]


def test_attention_that_cannot_be_seen_raises_or_is_noted() -> None:
    with pytest.raises(ValueError, match=r"no attention call seen in Unknown.*MultiheadAttention"):
        probe_routes(Unknown(Opaque()))
    result = probe_routes(Unknown(Opaque(), HandWritten("full")))
    assert [block.layer for block in result.blocks] == [1]
    assert any("blocks.0.attention" in note for note in result.notes)


def test_no_attention_raises_with_what_was_found() -> None:
    with pytest.raises(
        ValueError, match=r"no attention call seen in Unknown: 3 softmax.*attn_implementation=\"eager\""
    ):
        probe_routes(Unknown(HandWritten("linear")))


def test_bad_input_raises() -> None:
    with pytest.raises(ValueError, match="meta device"):
        probe_routes(build("llama", device="meta"))
    with pytest.raises(ValueError, match="at least 8"):
        probe_routes(build("llama"), num_tokens=4)
    quantised = build("llama")
    for layer in quantised.model.layers:
        for name in ("q_proj", "k_proj"):
            weight = getattr(layer.self_attn, name)._parameters.pop("weight").data
            getattr(layer.self_attn, name).weight = weight  # as of a packed base: the forward pass sees no parameter
    with pytest.raises(ValueError, match="no floating-point weight feeds their queries"):
        probe_routes(quantised)
    with pytest.raises(ValueError, match="vocabulary"):
        probe_routes(nn.Linear(3, 3))
    broken = build("llama")
    broken.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"queries of 'model.layers.1.self_attn' are not finite"):
        probe_routes(broken)
