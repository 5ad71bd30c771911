"""Restore a model whose parameters are split over processes: each puts back its own part, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from routeguard.protect.modes import Interpolate, QKRestore, Restoration
from routeguard.protect.rows import put_rows, take_rows
from routeguard.restoration.methods import interpolated
from routeguard.restoration.report import LayerRestore, RestoreReport, describe_method
from routeguard.routes.collection import Routes, count_rows
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.shard import Shard


@torch.no_grad()
def restore_shards(
    shards: Sequence[Shard],
    starts: Mapping[str, Tensor],
    routes: Routes,
    method: Restoration,
    drift_before: Mapping[tuple[int, str], float],
    origin: str,
) -> RestoreReport:
    """Put the held rows back, in place. Every process must call it.

    Args:
        shards: this process' parts of the held parameters.
        starts: this process' part of each start, as `start_values` gives it.
        routes: of the whole model.
        method: `QKRestore` or `Interpolate`, which need no other entries than their own.
        drift_before: (layer, role) to drift, for the report.
        origin: where the start came from, for the report.

    Raises ValueError for a method that needs whole matrices (QK-Pro). Nothing is then written.
    """
    if not isinstance(method, (QKRestore, Interpolate)):
        raise ValueError(
            f"{method.name} needs whole matrices, and parameters are split over processes; restore the saved "
            f"checkpoint: routeguard restore BASE TUNED --out FIXED --method {method.name}"
        )
    movable = [shard for shard in shards if shard.name in starts]
    changed = []
    for shard in movable:
        tuned, start = take_rows(shard.parameter, shard.rows, shard.dim), starts[shard.name]
        values = start if isinstance(method, QKRestore) else interpolated(tuned, start, method.alpha).values
        changed.append((values != tuned).sum() * (tuned.element_size() * shard.share))
        put_rows(shard.parameter, shard.rows, values, shard.dim)
    counts = sum_over_processes(torch.stack(changed).double()).tolist() if changed else []
    return RestoreReport(describe_method(method, routes), origin, _layers(movable, counts, drift_before))


def _layers(
    shards: Sequence[Shard], changed_bytes: Sequence[float], drift_before: Mapping[tuple[int, str], float]
) -> tuple[LayerRestore, ...]:
    members: dict[int, list[tuple[Shard, float]]] = {}
    for shard, count in zip(shards, changed_bytes, strict=True):
        members.setdefault(shard.routes[0].layer, []).append((shard, count))
    return tuple(
        LayerRestore(
            layer=layer,
            tensors=tuple(shard.name for shard, _ in group),
            num_rows=sum(_num_rows(shard) for shard, _ in group),
            drift_before={role: value for (at, role), value in drift_before.items() if at == layer},
            changed_bytes=round(sum(count for _, count in group)),
        )
        for layer, group in sorted(members.items())
    )


def _num_rows(shard: Shard) -> int:
    if shard.whole_rows is None:
        return shard.shape[shard.whole_dim]
    return count_rows(shard.whole_rows)
