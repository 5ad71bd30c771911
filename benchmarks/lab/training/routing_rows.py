"""The routing rows of a model in training, with their start: what the lab's own mechanisms act on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from routeguard.protect.held import held_parameters
from routeguard.protect.rows import put_rows, take_rows
from routeguard.routes.find import find_routes


class RoutingRows:
    """Query and key rows of the full-attention layers, one tensor a parameter, and copies of how they were."""

    def __init__(self, model: nn.Module) -> None:
        self.held = held_parameters(model, find_routes(model))
        self.start = self.copies()

    def values(self) -> list[Tensor]:
        """The rows as they are now (views where a parameter is routing as a whole)."""
        return [take_rows(h.parameter.detach(), h.rows, h.dim) for h in self.held]

    def copies(self) -> list[Tensor]:
        """The rows as they are now, as copies."""
        return [values.clone() for values in self.values()]

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        """Write values over the rows."""
        for held, new in zip(self.held, values, strict=True):
            put_rows(held.parameter, held.rows, new, held.dim)
