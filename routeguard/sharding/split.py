"""Which held parameters are split over processes, and what this process has of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from routeguard.protect.held import Held
from routeguard.sharding.distributed_tensors import shard_of
from routeguard.sharding.shard import Shard, make_shard
from routeguard.sharding.whole import is_distributed_tensor


def shards_of(held: Sequence[Held]) -> list[Shard] | None:
    """The local part of every held parameter, whole ones among them too; None if nothing is split."""
    if not any(is_distributed_tensor(h.parameter) for h in held):
        return None
    return [shard_of(h) if is_distributed_tensor(h.parameter) else _everywhere(h) for h in held]


def _everywhere(held: Held) -> Shard:
    """A parameter that every process has whole (FSDP ignores it)."""
    parameter = held.parameter.detach()
    return make_shard(
        held,
        parameter,
        shape=tuple(parameter.shape),
        dim=held.dim,
        copies=torch.distributed.get_world_size(),
        cut=lambda tensor: tensor,
    )
