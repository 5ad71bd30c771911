"""The start of everything that can move, where training needs it: on the device, and of a shard its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from routeguard.protect.held import Held
from routeguard.protect.rows import take_rows
from routeguard.restoration.reference import Reference
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.shard import Shard


def start_values(
    held: Sequence[Held], reference: Reference | None, *, fresh: bool, earlier: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The start of the held rows that can move, by name, in memory of its own.

    Args:
        held: parameters, or shards of them.
        reference: the run's start; None needs no values (`Freeze`).
        fresh: the run begins at the live weights; what a base checkpoint cannot know (a fresh adapter) starts there.
            Later its B was zero then, and what A was does not matter (B·A was zero).
        earlier: what this gave in an earlier `train()` that protected the same start.
    """
    if reference is None:
        return {}
    movable = [h for h in held if h.trainable]
    if earlier is not None and all(h.name in earlier for h in movable):
        return {h.name: earlier[h.name] for h in movable}
    starts = {}
    for h in movable:
        unknown = h.canonical not in reference.tensors and h.part != "base"  # what a base cannot know of an adapter
        if reference.known_digest or (unknown and (fresh or h.part == "lora_A")):
            values = take_rows(h.parameter.detach(), h.rows, h.dim)  # the live weights are the start
        elif unknown and h.part == "lora_B":
            values = torch.zeros_like(take_rows(h.parameter.detach(), h.rows, h.dim))
        elif isinstance(h, Shard):
            values = h.start_of(reference.values(h.canonical, h.whole_rows, h.whole_dim))
        else:
            values = reference.values(h.canonical, h.rows, h.dim)
        starts[h.name] = values.to(h.parameter.device, h.parameter.dtype, copy=True)
    return starts


def refuse_nan(held: Sequence[Held]) -> None:
    """Raise ValueError, in every process alike, if a held parameter has entries that are no numbers."""
    floats = [h for h in held if h.parameter.dtype.is_floating_point]
    if not floats:
        return
    bad = torch.stack([(~torch.isfinite(h.parameter.detach())).any().float() for h in floats])
    if any(isinstance(h, Shard) for h in held):
        bad = sum_over_processes(bad)
    for h, found in zip(floats, bad.tolist(), strict=True):
        if found:
            raise ValueError(
                f"{h.name} has NaN or infinite entries before the first step: there is no sound start to protect"
            )
