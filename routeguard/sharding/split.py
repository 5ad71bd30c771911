"""Which held parameters are split over processes, and what this process has of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from routeguard.protect.held import Held
from routeguard.sharding import distributed_tensors, zero
from routeguard.sharding.shard import Shard, make_shard
from routeguard.sharding.whole import is_distributed_tensor


def shards_of(held: Sequence[Held]) -> list[Shard] | None:
    """The local part of every held parameter, whole ones among them too; None if nothing is split."""
    if not any(is_split(h.parameter) for h in held):
        return None
    return [_shard_of(h) for h in held]


def is_split(parameter: Tensor) -> bool:
    """Whether an engine has split a parameter, or the masters that it trains, over processes."""
    return is_distributed_tensor(parameter) or zero.is_partitioned(parameter)


def _shard_of(held: Held) -> Shard:
    if is_distributed_tensor(held.parameter):
        return distributed_tensors.shard_of(held)
    return zero.shard_of(held) if zero.is_partitioned(held.parameter) else _everywhere(held)


def _everywhere(held: Held) -> Shard:
    """A parameter that every process has whole (FSDP ignores it, or it is frozen under ZeRO-1 or 2)."""
    parameter = held.parameter.detach()
    return make_shard(
        held,
        parameter,
        shape=tuple(parameter.shape),
        dim=held.dim,
        copies=torch.distributed.get_world_size(),
        cut=lambda tensor: tensor,
        whole_gradient=True,
    )
