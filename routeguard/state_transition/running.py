"""What the layers of a converted model need to know about the pass that is going on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from routeguard.state_transition.cache import StateTransitionCache
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import StepLayout, block_mask, visible
from routeguard.state_transition.linear_attention import ChunkPlan, plan_chunks

ATTENTION_FUNCTIONS = ("sdpa", "eager", "flex_attention")  # those that can be shown steps


@dataclass
class Running:
    """One forward pass.

    Attributes:
        config: of the conversion.
        layout: of the tokens that are read.
        cache: where the pass writes to; None in training.
        sees: where the pass goes on with a text that the cache holds: which of the places held and of its own tokens
            each token may see, [rows, tokens, places] booleans. None: a text begins.
        finished: [rows], how many steps ended before this pass. None: a text begins.
    """

    config: StateTransitionConfig
    layout: StepLayout
    cache: StateTransitionCache | None = None
    sees: Tensor | None = None
    finished: Tensor | None = None

    @property
    def goes_on(self) -> bool:
        return self.sees is not None

    @cached_property
    def limited(self) -> bool:
        """Whether tokens see less than the model's own mask allows."""
        return self.goes_on or not self.layout.single

    @cached_property
    def plan(self) -> ChunkPlan:
        return plan_chunks(self.layout, self.config, self.finished)

    def mask(self, dtype: torch.dtype, implementation: str) -> Any:
        """What may be seen, as an attention function reads it: booleans for SDPA, what is added for eager, blocks."""
        if implementation == "flex_attention":
            return self._blocks
        if implementation == "sdpa":
            return self._visible
        added = torch.zeros(self._visible.shape, dtype=dtype, device=self._visible.device)
        return added.masked_fill(~self._visible, torch.finfo(dtype).min)

    @cached_property
    def _visible(self) -> Tensor:
        return visible(self.layout) if self.sees is None else self.sees[:, None]

    @cached_property
    def _blocks(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        if self.sees is None:
            return block_mask(self.layout)
        rows, tokens, held = self.sees.shape
        if tokens > 1:
            raise ValueError(
                "flex_attention cannot read several tokens more of a text that a cache holds; give them one at a time, "
                "or use attn_implementation='sdpa'"
            )
        places = self.sees[:, 0]

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return places[row, key]

        return create_block_mask(sees, rows, None, 1, held, device=str(places.device))
