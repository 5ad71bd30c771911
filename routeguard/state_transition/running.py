"""What the layers of a converted model need to know about the pass that is going on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from routeguard.state_transition.cache import StateTransitionCache
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import StepLayout
from routeguard.state_transition.linear_attention import ChunkPlan, plan_chunks


@dataclass
class Running:
    """One forward pass.

    Attributes:
        config: of the conversion.
        layout: of the tokens that are read.
        visible: what they may see, [rows, 1, tokens, places] booleans; None: what the model's own mask allows.
        cache: where the pass writes to; None in training.
        goes_on: it reads the next token of a text that the cache knows.
    """

    config: StateTransitionConfig
    layout: StepLayout
    visible: Tensor | None
    cache: StateTransitionCache | None = None
    goes_on: bool = False

    @cached_property
    def plan(self) -> ChunkPlan:
        return plan_chunks(self.layout, self.config)

    def mask(self, dtype: torch.dtype, implementation: str) -> Tensor | None:
        """`visible` in the form that an attention function reads: booleans for SDPA, what is added for eager."""
        if self.visible is None or implementation == "sdpa":
            return self.visible
        added = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return added.masked_fill(~self.visible, torch.finfo(dtype).min)
