"""Notice updates that are too small for the parameters' dtype and vanish in rounding (bf16 without fp32 masters)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from routeguard.protect.groups import RoutingGroups

_SAMPLE = 65_536
_LOW = (torch.bfloat16, torch.float16)


class ResolutionWatch:
    """Counts, on a sample of a tagged group's entries, how many a step actually changes.

    Works on the device without a host synchronisation; `report` reads the counts at a log step and warns once if fewer
    than half of the entries that should have moved did.
    """

    def __init__(self, groups: RoutingGroups) -> None:
        members = [p for group in groups.tagged for p in group["params"] if p.dtype in _LOW]
        self.groups = groups
        self.parameter: Tensor | None = max(members, key=lambda p: p.numel()) if members else None
        self._before: Tensor | None = None
        self._counts: list[Tensor] = []
        self._warned = False
        self._hooks: list[Any] = []
        if self.parameter is not None:
            self._hooks = [
                groups.optimizer.register_step_pre_hook(lambda *_: self._look_before()),
                groups.optimizer.register_step_post_hook(lambda *_: self._look_after()),
            ]

    @torch.no_grad()
    def _look_before(self) -> None:
        assert self.parameter is not None
        if len(self._counts) < 50 and any(float(group["lr"]) > 0 for group in self.groups.tagged):
            self._before = self.parameter.detach().flatten()[:_SAMPLE].clone()

    @torch.no_grad()
    def _look_after(self) -> None:
        assert self.parameter is not None
        if self._before is None or self.parameter.grad is None:
            return
        gradient = self.parameter.grad.flatten()[:_SAMPLE]
        should = gradient != 0
        did = should & (self.parameter.detach().flatten()[:_SAMPLE] != self._before)
        self._counts.append(torch.stack([did.sum(), should.sum()]))
        self._before = None

    def report(self) -> float | None:
        """Fraction of entries that moved since the last report (None: nothing to say), with a warning when below half."""
        if not self._counts:
            return None
        moved, total = torch.stack(self._counts).sum(0).tolist()
        self._counts.clear()
        if not total:
            return None
        fraction = moved / total
        if fraction < 0.5 and not self._warned:
            self._warned = True
            assert self.parameter is not None
            dtype = str(self.parameter.dtype).removeprefix("torch.")
            warnings.warn(
                f"only {fraction:.1%} of the routing entries that have a gradient change in a step: the updates of the "
                f"{self.groups.tag!r} group are below the resolution of {dtype}, and rounding swallows them. Load the model in "
                "float32 (bf16=True then trains with float32 masters), use an optimizer with stochastic rounding, a larger "
                "scale, or Freeze()",
                UserWarning,
                stacklevel=2,
            )
        return fraction

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
