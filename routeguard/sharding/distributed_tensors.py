"""Shards of DTensors: FSDP2 (`fully_shard`) and tensor parallelism."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held
from routeguard.sharding.shard import Shard, make_shard
from routeguard.sharding.whole import local_tensor


def reshard(model: nn.Module) -> None:
    """Let FSDP2 drop the whole parameters that a forward pass may have left, so that the next one gathers them anew.

    Needed after writing to shards: with `reshard_after_forward=False` an evaluation leaves whole copies behind.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_of(held: Held) -> Shard:
    """The local part of a held DTensor. Moves nothing between processes.

    Raises ValueError for placements other than `Shard` and `Replicate`, and where rows themselves are split.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as SplitAlong

    whole: Any = held.parameter
    mesh, placements = whole.device_mesh, whole.placements
    unknown = [placement for placement in placements if type(placement) not in (SplitAlong, Replicate)]
    if unknown:
        raise ValueError(
            f"{held.name} is placed as {placements} on its mesh; routeguard reads Shard and Replicate only. Protect "
            "it without FSDP on top of tensor parallelism, or restore the saved checkpoint"
        )

    def cut(tensor: Tensor) -> Tensor:
        there = tensor.to(mesh.device_type)
        part: Tensor = distribute_tensor(there, mesh, placements, src_data_rank=None).to_local()
        return part.to(tensor.device)

    replicas = prod(mesh.size(at) for at, placement in enumerate(placements) if isinstance(placement, Replicate))
    outside = torch.distributed.get_world_size() // mesh.size()
    return make_shard(
        held,
        local_tensor(whole),
        shape=tuple(whole.shape),
        dim=held.dim,
        copies=replicas * max(outside, 1),
        cut=cut,
        whole_gradient=False,
    )
