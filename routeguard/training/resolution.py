"""Notice updates that are too small for the parameters' dtype and vanish in rounding (bf16 without fp32 masters)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from routeguard.protect.anchor import AnchorPull
from routeguard.protect.routing_groups import RoutingGroups
from routeguard.sharding.whole import local_tensor

_SAMPLE = 65_536  # entries looked at
_STEPS = 50  # steps looked at between two reports
_LOW = (torch.bfloat16, torch.float16)
FEW = 0.5  # a smaller share of moving entries draws a warning


def moving_share(step: float, std: float, dtype: torch.dtype) -> float:
    """Share of normally distributed weights that an update of this size changes, rounded to nearest (derived).

    Neighbours of a weight in [2^e, 2^(e+1)) are eps · 2^e apart, and it moves if the update is more than half of that.

    Args:
        step: absolute size of the update, above 0.
        std: standard deviation of the weights, whose mean is 0.
        dtype: of the weights.
    """
    moves_below = 2.0 ** math.ceil(math.log2(2 * step / torch.finfo(dtype).eps))
    return math.erf(moves_below / (std * math.sqrt(2)))


def too_small(share: float, tag: str, dtype: torch.dtype) -> str:
    """What is wrong where only this share of the entries of a tagged group moves in a step, and what helps."""
    return (
        f"only {share:.1%} of the routing entries that should move in a step do: the updates of the {tag!r} group are "
        f"below the resolution of {str(dtype).removeprefix('torch.')}, and rounding swallows them. Load the model in "
        "float32 (bf16=True then trains with float32 masters), use an optimizer with stochastic rounding, a larger "
        "scale or strength, or Freeze()"
    )


class ResolutionWatch:
    """Counts, on a sample of a tagged group's entries, how many of those that should move in a step do.

    For `LowLR` those with a gradient, over the whole step; for `Anchor` those away from their start, over the pull
    alone. Works on the device without a host synchronisation; `report` reads the counts at a log step and warns once
    if fewer than half moved.

    Args:
        groups: the tagged groups; with none in bf16 or fp16 the watch does nothing.
        pull: the anchor's pull, if that is the mode.
    """

    def __init__(self, groups: RoutingGroups, pull: AnchorPull | None = None) -> None:
        members = [p for group in groups.tagged for p in group["params"] if p.dtype in _LOW]
        self._groups = groups
        self._parameter = max(members, key=lambda p: p.numel()) if members else None
        self._before: Tensor | None = None
        self._counts: list[Tensor] = []
        self._warned = False
        self._hooks: list[Any] = []
        if self._parameter is None:
            return
        if pull is not None:
            start = pull.start_of(self._parameter).flatten()[:_SAMPLE]
            pull.before = self._look_before
            pull.after = lambda: self._look_after(self._before != start if self._before is not None else None)
        else:
            optimizer = groups.optimizer
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._look_before()),
                optimizer.register_step_post_hook(lambda *_: self._look_after(self._has_gradient())),
            ]

    def report(self) -> float | None:
        """Fraction of the entries that moved since the last report (None: nothing to say). Warns once below a half."""
        if not self._counts:
            return None
        moved, total = torch.stack(self._counts).sum(0).tolist()
        self._counts.clear()
        if not total:
            return None
        fraction = float(moved / total)
        if fraction < FEW and not self._warned:
            self._warned = True
            assert self._parameter is not None
            warnings.warn(too_small(fraction, self._groups.tag, self._parameter.dtype), UserWarning, stacklevel=2)
        return fraction

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _sampled(self) -> Tensor:
        assert self._parameter is not None
        sample: Tensor = local_tensor(self._parameter).flatten()[:_SAMPLE]
        return sample

    def _has_gradient(self) -> Tensor | None:
        assert self._parameter is not None
        gradient = self._parameter.grad
        if gradient is None:
            return None
        has_gradient: Tensor = local_tensor(gradient).flatten()[:_SAMPLE] != 0
        return has_gradient

    @torch.no_grad()
    def _look_before(self) -> None:
        active = len(self._counts) < _STEPS and any(float(group["lr"]) > 0 for group in self._groups.tagged)
        self._before = self._sampled().clone() if active else None

    @torch.no_grad()
    def _look_after(self, should: Tensor | None) -> None:
        if self._before is None or should is None:
            return
        moved = should & (self._sampled() != self._before)
        self._counts.append(torch.stack([moved.sum(), should.sum()]))
        self._before = None
