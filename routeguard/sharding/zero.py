"""Shards under DeepSpeed ZeRO: the part of the float32 masters that this process owns, at exact offsets.

ZeRO flattens the parameters of a group into one vector and gives each process a stretch of it. DeepSpeed keeps, for
each parameter, where its own stretch lies; that is read here, and nothing is guessed. Frozen parameters are not in the
optimizer: stages 1 and 2 leave them whole, stage 3 splits their 16-bit values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from routeguard.protect.held import Held
from routeguard.protect.rows import put_rows, take_rows
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.shard import Shard, make_shard
from routeguard.sharding.whole import whole_shape


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO owns a parameter: partitioned itself (stage 3), or with partitioned masters (stages 1 and 2)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def shard_of(held: Held) -> Shard:
    """This process' stretch of a held parameter: of its float32 masters, or of its values where it is frozen."""
    parameter: Any = held.parameter
    shape = whole_shape(parameter)
    local, offset, group_size = (_stage_3 if hasattr(parameter, "ds_id") else _stages_1_and_2)(held)

    def cut(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[offset : offset + local.numel()]

    copies = max(torch.distributed.get_world_size() // group_size, 1)
    return make_shard(held, local, shape=shape, dim=0, copies=copies, cut=cut, whole_gradient=True)


def gathered(parameter: Any) -> Tensor:
    """All values of a parameter that stage 3 has partitioned; every process must call it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        values: Tensor = parameter.detach().clone()
    return values


def zero_optimizer(optimizer: Any) -> Any:
    """DeepSpeed's ZeRO optimizer inside accelerate's wrapper, or None."""
    while optimizer is not None:
        if hasattr(optimizer, "single_partition_of_fp32_groups") or hasattr(optimizer, "fp32_partitioned_groups_flat"):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


@torch.no_grad()
def publish(shards: Sequence[Shard]) -> None:
    """Copy held rows from the masters to what the model computes with, and nothing else. Every process must call it.

    Stages 1 and 2 gather one tensor at a time; under stage 3 each process writes its own stretch.
    """
    mastered = [shard for shard in shards if is_partitioned(shard.split) and shard.trainable]
    split = [shard for shard in mastered if hasattr(shard.split, "ds_id")]
    for shard in mastered:
        if shard not in split:
            put_rows(shard.split, shard.whole_rows, _gathered_rows(shard), shard.whole_dim)
    if not split:
        return
    optimizer: Any = split[0].split._z3_optimizer  # type: ignore[attr-defined]
    optimizer._partition_all_parameters()
    for shard in split:
        put_rows(_stretch(shard), shard.rows, take_rows(shard.parameter, shard.rows))
    if optimizer.persistent_parameters:  # those that stage 3 keeps whole in every process
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def published(held: Held) -> list[Tensor]:
    """The held rows that the model computes with, where those that are trained are masters apart from it; else none."""
    parameter: Any = held.whole
    if not (isinstance(held, Shard) and is_partitioned(parameter) and held.trainable):
        return []
    shard = held
    if not hasattr(parameter, "ds_id"):
        return [take_rows(parameter.detach(), shard.whole_rows, shard.whole_dim)]
    return [take_rows(_stretch(shard), shard.rows)]


def _stretch(shard: Shard) -> Tensor:
    """This process' part of a parameter under stage 3, in the model's dtype."""
    parameter: Any = shard.split
    stretch: Tensor = parameter.ds_tensor.detach().view(-1)
    return stretch[: shard.parameter.numel()]


def _gathered_rows(shard: Shard) -> Tensor:
    """All held rows of the masters of one parameter, from every process: added up as bytes, which changes no bit."""
    masters = shard.parameter
    whole = torch.zeros(shard.shape, dtype=masters.dtype, device=masters.device)
    shard.cut(whole).copy_(masters)
    added = sum_over_processes(whole.view(-1).view(torch.uint8)).view(masters.dtype).view(shard.shape)
    return take_rows(added, shard.whole_rows, shard.whole_dim)


def pulls_of(shards: Sequence[Shard], starts: dict[str, Tensor]) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
    """For a flat master of the optimizer: the held stretches in it, each beside its start."""
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for shard in shards:
        if shard.name in starts and shard.parameter.numel():
            storage = shard.parameter.untyped_storage().data_ptr()
            parts.setdefault(storage, []).append((shard.parameter, starts[shard.name]))
    return lambda flat: parts.get(flat.untyped_storage().data_ptr(), [])


def refuse_masters_on_disk(name: str) -> None:
    """Raise ValueError: ZeRO keeps the float32 masters of this trained parameter on disk."""
    raise ValueError(f"the masters of {name} are swapped out to disk; routeguard needs them in memory")


def _stages_1_and_2(held: Held) -> tuple[Tensor, int, int]:
    """(the stretch of the masters, where it begins in the flattened parameter, processes that share it out)."""
    parameter: Any = held.parameter
    mapping = parameter._hp_mapping
    world = torch.distributed.get_world_size()
    if mapping is None:  # another process owns all of it
        return torch.zeros(0, dtype=torch.float32, device=parameter.device), 0, world
    return mapping.get_hp_fragment(), mapping.lp_fragment_address.start, world


def _stage_3(held: Held) -> tuple[Tensor, int, int]:
    parameter: Any = held.parameter
    group = parameter.ds_process_group
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    stretch = parameter.ds_tensor.numel()
    offset = min(rank * stretch, parameter.ds_numel)
    count = min(stretch, parameter.ds_numel - offset)  # the last stretch may be padded
    zero = getattr(parameter, "_z3_optimizer", None)
    if zero is None or not parameter.requires_grad:
        local = parameter.ds_tensor.detach()
    else:
        if zero.swap_optimizer:
            refuse_masters_on_disk(held.name)
        at, begins, _ = zero.grad_position[zero.get_param_id(parameter)]
        local = zero.fp32_partitioned_groups_flat[at].detach().narrow(0, begins, stretch)
    return local[:count], offset, size
