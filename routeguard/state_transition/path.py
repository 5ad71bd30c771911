"""`LinearPath`: the trained side path of one attention layer, hooked beside its frozen projections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.linear_attention import chunked_attention, state_norm
from routeguard.state_transition.projections import Projections

if TYPE_CHECKING:
    from routeguard.state_transition.running import Running


class LinearPath(nn.Module):
    """Adapters on the frozen q, k and v, a gate, and a multiplier that starts at 0.

    `output projection(ĥ_SA + multiplier · gate(h) ∗ o)`, with o from `chunked_attention` or, while a text is written,
    from the cache's state. The multiplier has one value a head; at 0 the layer gives what it gave before, bit for bit.
    Queries and keys go through the frozen layer's own norms where it has them; no rotary embedding acts on them (ours).

    Source: arXiv 2602.01198, merge of the two paths; the multiplier is ours.
    """

    def __init__(self, projections: Projections, config: StateTransitionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.projections = projections
        self.config = config
        heads, width = projections.num_heads, projections.value_width
        device = projections.device
        sizes = {
            "query": heads * projections.width,
            "key": projections.num_key_heads * projections.width,
            "value": projections.num_key_heads * width,
        }
        options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        self.down = nn.ModuleDict({role: nn.Linear(projections.input_width, config.rank, **options) for role in sizes})
        self.up = nn.ModuleDict({role: nn.Linear(config.rank, size, **options) for role, size in sizes.items()})
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)  # so the path starts from the frozen projections
        self.gate: nn.Linear | None = None
        if config.gate != "none":
            values = heads if config.gate == "head" else heads * width
            self.gate = nn.Linear(projections.input_width, values, dtype=dtype, device=device)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)
        self.multiplier = nn.Parameter(torch.zeros(heads, dtype=dtype, device=device))
        # Of the last pass, without gradients: the mean of the gate, and (where watched) that of the states' norms.
        self.openness: Tensor | None = None
        self.state_norm: Tensor | None = None
        self.watched = False

    def forward(self, hidden: Tensor, frozen: dict[str, Tensor], running: Running) -> Tensor:
        """What is added to the output projection's input: [rows, tokens, heads · value width].

        Args:
            hidden: [rows, tokens, input width], what the projections read.
            frozen: by role, what the frozen projections gave for it.
            running: the pass that is going on.
        """
        projections = self.projections
        inner = hidden.to(self.multiplier.dtype)
        query, key, value = (
            self._heads(frozen[role] + self.config.adapter_scale * self.up[role](self.down[role](inner)), role)
            for role in ("query", "key", "value")
        )
        if self.config.features == "unit":
            query = nn.functional.normalize(query.float() if query.dtype.itemsize < 4 else query, dim=-1)
            key = nn.functional.normalize(key.float() if key.dtype.itemsize < 4 else key, dim=-1)
        else:
            query = query * projections.width**-0.5
        read = self._read(query, key, value.to(query.dtype), running)
        if self.config.read_norm == "rms":
            read = nn.functional.rms_norm(read, read.shape[-1:], eps=1e-6)
        read = read * self.multiplier.to(read.dtype)[:, None, None]
        read = read.transpose(1, 2)  # [rows, tokens, heads, value width]
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(inner)).unflatten(-1, (projections.num_heads, -1))
            self.openness = gate.detach().float().mean()
            read = read * gate.to(read.dtype)
        added: Tensor = read.flatten(2)
        return added

    def _read(self, query: Tensor, key: Tensor, value: Tensor, running: Running) -> Tensor:
        if running.cache is None:
            if self.watched:
                self.state_norm = state_norm(key.detach(), value.detach(), running.plan)
            return chunked_attention(query, key, value, running.plan)
        state = running.cache.state(self.projections.layer, key, value)
        if running.goes_on and query.shape[2] == 1:
            return state.read(query, key, value, running.layout.kind[:, 0])
        return state.read_piece(query, key, value, running.plan, running.layout.end.finished)

    def _heads(self, flat: Tensor, role: str) -> Tensor:
        """[rows, heads, tokens, width] of [rows, tokens, heads · width], normalised as the frozen layer does it."""
        heads = self.projections.num_heads if role == "query" else self.projections.num_key_heads
        norm = self.projections.norms.get(role)
        whole = norm is not None and next(norm.parameters()).numel() == flat.shape[-1]  # over all heads together
        if norm is not None and whole:
            flat = norm(flat)
        split: Tensor = flat.unflatten(-1, (heads, -1))
        if norm is not None and not whole:
            split = norm(split)
        return split.transpose(1, 2)
