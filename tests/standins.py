"""Small stand-ins for models whose code is on the Hub: the same names and the same traps, none of their code.

HypeNet: `mixer_types` names the attention layers, lightning layers carry the same projections, attention has no rotary
embedding and returns its output twice. Jet-Nemotron: `layer_types` with labels of its own, biases on q and k, windowed
layers of the same class, and a linear block with q_proj and k_proj.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 48, 4, 2, 16, 96


class StandInConfig:
    """Enough of a config: attributes, and a dict of them."""

    def __init__(self, model_type: str, **fields: Any) -> None:
        self.model_type = model_type
        self.vocab_size = VOCABULARY
        self.hidden_size = HIDDEN
        self.num_attention_heads = HEADS
        self.num_key_value_heads = KV_HEADS
        self.head_dim = HEAD_DIM
        for name, value in fields.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class SoftmaxAttention(nn.Module):
    """Grouped-query attention; optionally normalised, rotated or windowed."""

    def __init__(
        self, *, bias: bool = False, qk_norm: bool = False, rotary: bool = False, window: int | None = None
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=bias)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        if qk_norm:
            self.q_norm = nn.RMSNorm(HEAD_DIM)
            self.k_norm = nn.RMSNorm(HEAD_DIM)
        self.qk_norm, self.rotary, self.window = qk_norm, rotary, window

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, _ = hidden.shape
        query = self.q_proj(hidden).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        key = self.k_proj(hidden).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary:
            query, key = rotate(query), rotate(key)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None:
            mask = mask.triu(1 - self.window)
        repeats = HEADS // KV_HEADS
        mixed = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), attn_mask=mask
        )
        output = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output, output


class GatedSoftmaxAttention(SoftmaxAttention):
    """HypeNet's: an output gate in a tensor of its own."""

    def __init__(self) -> None:
        super().__init__(qk_norm=True)
        self.o_gate = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output = super().forward(hidden)[0] * torch.sigmoid(self.o_gate(hidden))
        return output, output


class LinearAttention(nn.Module):
    """Causal linear attention with projections that are named like those of softmax attention."""

    def __init__(self, **extra: nn.Module) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        for name, module in extra.items():
            self.add_module(name, module)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query, key = functional.elu(self.q_proj(hidden)) + 1, functional.elu(self.k_proj(hidden)) + 1
        value = self.v_proj(hidden)
        states = torch.cumsum(key.unsqueeze(-1) * value.unsqueeze(-2), dim=1)
        output = self.o_proj(torch.einsum("btd,btde->bte", query, states) / query.shape[-1])
        return output, output


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = mixer
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))[0]
        return hidden + self.mlp(hidden)


class StandInModel(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class StandInForCausalLM(nn.Module):
    def __init__(self, config: StandInConfig, mixers: list[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.model = StandInModel([Layer(mixer) for mixer in mixers])
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))


def rotate(states: Tensor) -> Tensor:
    length, width = states.shape[-2:]
    frequencies = 1e6 ** (-torch.arange(0, width, 2) / width)
    angles = torch.cat([torch.outer(torch.arange(length), frequencies)] * 2, dim=-1)
    first, second = states.chunk(2, dim=-1)
    return states * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def hypenet(model_type: str = "hypenet", **fields: Any) -> StandInForCausalLM:
    """Five layers, attention at 1 and 4."""
    kinds = ["lightning-attn", "attn", "lightning-attn", "lightning-attn", "attn"]
    config = StandInConfig(model_type, num_hidden_layers=5, **(fields or {"mixer_types": kinds}))
    torch.manual_seed(0)
    lightning = {"o_gate": nn.Linear(HIDDEN, HIDDEN), "z_norm": nn.RMSNorm(HIDDEN)}
    mixers = [GatedSoftmaxAttention() if kind == "attn" else LinearAttention(**lightning) for kind in kinds]
    return StandInForCausalLM(config, mixers)


def jet_nemotron() -> StandInForCausalLM:
    """Five layers: full attention at 2, windowed attention of the same class at 3, linear blocks elsewhere."""
    kinds = ["jet", "jet", "attn", "swa", "jet"]
    window = 8
    sizes = {"num_hidden_layers": 5, "sliding_window": window, "rope_theta": 1e6}
    config = StandInConfig("jet_nemotron", layer_types=kinds, **sizes)
    torch.manual_seed(0)
    mixers = {
        "attn": lambda: SoftmaxAttention(bias=True, rotary=True),
        "swa": lambda: SoftmaxAttention(bias=True, rotary=True, window=window),
        "jet": lambda: LinearAttention(dynamic_conv=nn.Linear(HIDDEN, HIDDEN)),
    }
    return StandInForCausalLM(config, [mixers[kind]() for kind in kinds])
