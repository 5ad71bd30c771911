"""Anchor: after each step, pull routing back towards its start, scaled by the learning rate (decoupled L2-SP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.groups import check_pull_rate, pull_share, split_groups
from routeguard.protect.held import Held, held_parameters, trained_adapters
from routeguard.protect.modes import Anchor
from routeguard.protect.routing_groups import RoutingGroups
from routeguard.protect.rows import take_rows
from routeguard.routes.collection import Routes
from routeguard.routes.wording import as_printed, first_of
from routeguard.sharding.split import shards_of
from routeguard.sharding.whole import local_tensor


class AnchorPull:
    """The pull `p ← p + lr · strength · (start − p)` on the tagged groups of an optimizer, after each of its steps.

    For LoRA the pull acts on ΔW = s·B·A without forming it: a zero-start adapter has ΔW₀ = 0, and scaling B by
    `1 − lr · strength` scales ΔW by exactly that; A is left alone. Other starts (PiSSA, OLoRA) pull both factors to
    their start (the exact interpolation would need twice the rank).

    Args:
        groups: from `split_groups(..., tag="anchor", weight_decay=0.0)`.
        starts: for each held name, the start of its held rows, on the parameter's device.
        mode: the strength.
        parts_of: under ZeRO, where groups hold flat masters: what is pulled in one of them, each beside its start.
            None (default): the groups' members.
    """

    def __init__(
        self,
        groups: RoutingGroups,
        starts: Mapping[str, Tensor],
        mode: Anchor,
        parts_of: Callable[[Tensor], list[tuple[Tensor, Tensor]]] | None = None,
    ) -> None:
        check_pull_rate(groups.tagged, "Anchor", mode.strength)
        self.groups = groups
        self.mode = mode
        self._starts: dict[nn.Parameter, Tensor] = {}
        for member, (held, at) in groups.members.items() if parts_of is None else ():
            start = starts[held.name]
            self._starts[member] = start if at is None else _slice_of(start, held, at)
        self._parts_of = parts_of or self._parts_of_member
        self.before: Callable[[], None] | None = None  # called around each pull, by whoever watches it
        self.after: Callable[[], None] | None = None
        self._hook: Any = groups.optimizer.register_step_post_hook(lambda *_: self.pull())

    def __str__(self) -> str:
        pull = f"pulled to their start after each step, with strength {self.mode.strength:g}"
        return f"{self.mode.name}: {self.groups.describe_members()}, {pull}"

    _repr_pretty_ = as_printed

    @torch.no_grad()
    def pull(self) -> None:
        """One pull at the groups' current learning rates; ValueError, and none, if one of them would overshoot."""
        shares = [pull_share(float(group["lr"]), Anchor.__name__, self.mode.strength) for group in self.groups.tagged]
        if self.before is not None:
            self.before()
        for group, share in zip(self.groups.tagged, shares, strict=True):
            parts = [part for p in group["params"] for part in self._parts_of(p)]
            if parts:
                torch._foreach_lerp_([now for now, _ in parts], [start for _, start in parts], share)
        if self.after is not None:
            self.after()

    def _parts_of_member(self, member: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(local_tensor(member), self._starts[member])] if member in self._starts else []  # type: ignore[index]

    def start_of(self, member: nn.Parameter) -> Tensor:
        """Where a tagged parameter (or view of rows) is pulled to."""
        return self._starts[member]

    def remove(self) -> None:
        self._hook.remove()


def anchor(
    optimizer: torch.optim.Optimizer, model: nn.Module, routes: Routes, *, strength: float = 100.0
) -> AnchorPull:
    """`Anchor` for a plain loop: split a fresh optimizer and pull routing towards its present values after each step.

    Weight decay of the anchored parameters becomes 0, since it would pull towards zero instead. Costs one copy of the
    held rows. Raises ValueError as `split_groups` does, and for `lr * strength` above 1 (a later step does so too).
    """
    mode = Anchor(strength)
    held = anchored(held_parameters(model, routes))
    groups = split_groups(optimizer, held, tag=Anchor.name, weight_decay=0.0)
    parts = shards_of(held) or held
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in parts if h.trainable}
    return AnchorPull(groups, starts, mode)


def anchored(held: Sequence[Held]) -> list[Held]:
    """Those that the pull acts on. An adapter at zero is pulled through its B (and magnitude), and its A stays free.

    To be called at the start: it reads the values of B.
    """
    moved = {name.replace(".lora_B.", ".lora_A.") for name in trained_adapters(held)}
    shared = [h.name for h in held if h.is_shared_factor and h.name in moved]
    if shared:
        raise ValueError(
            f"{first_of(shared)} feeds routing rows and others, and its adapter is not at "
            "zero: pulling B alone would not hold the rows, and pulling A would hold the others. Start a fresh "
            "adapter (merge the old one first), or exclude the module from the adapter (routeguard.lora_config)"
        )
    return [h for h in held if h.part != "lora_A" or h.name in moved]


def _slice_of(start: Tensor, held: Held, at: tuple[int, int]) -> Tensor:
    offset = 0
    for first, stop in held.rows or ():
        if first == at[0]:
            return start.narrow(held.dim, offset, stop - first)
        offset += stop - first
    raise AssertionError(f"{at} is not a held range of {held.name}")
