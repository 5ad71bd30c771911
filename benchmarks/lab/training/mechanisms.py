"""What the lab tries and the package does not have.

A routing rate above 1, a trust region, restore-then-settle: thin callbacks over plain functions. They act after the
optimizer's step, so they know nothing of the optimizer; AdamW's state goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from benchmarks.lab.training.routing_rows import RoutingRows


def scaled_steps(before: Sequence[Tensor], after: Sequence[Tensor], scale: float) -> list[Tensor]:
    """`before + scale · (after − before)`: what a rate of `scale` times would have given without weight decay."""
    return [torch.lerp(b, a, scale) for b, a in zip(before, after, strict=True)]


def within_radius(values: Sequence[Tensor], start: Sequence[Tensor], radius: float) -> list[Tensor]:
    """Each tensor projected into the ball `‖W − W₀‖ ≤ radius · ‖W₀‖`."""
    projected = []
    for now, was in zip(values, start, strict=True):
        moved = now - was
        share = float(radius * torch.linalg.vector_norm(was) / torch.linalg.vector_norm(moved).clamp_min(1e-30))
        projected.append(was + moved * share if share < 1 else now)
    return projected


class _OnRows(TrainerCallback):  # type: ignore[misc]
    """Takes hold of the routing rows when training begins."""

    rows: RoutingRows

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows = RoutingRows(kwargs["model"])


class RoutingRate(_OnRows):
    """Routing learns at `scale` times the rate of the rest; above 1 it is sacrificed, to be restored at the end."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self.rows.copies()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.put(scaled_steps(self._before, self.rows.values(), self.scale))


class TrustRegion(_OnRows):
    """After each step queries and keys are projected back into a ball around their start (relative radius)."""

    def __init__(self, radius: float) -> None:
        self.radius = radius

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows.put(within_radius(self.rows.values(), self.rows.start, self.radius))


class Settle(_OnRows):
    """Queries and keys train freely for a share of the steps, then go back to their start and stay there."""

    def __init__(self, share: float) -> None:
        self.share = share

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 >= self.share * state.max_steps:  # the step is counted after this event
            self.rows.put(self.rows.start)
