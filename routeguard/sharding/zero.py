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
from routeguard.sharding.shard import Shard, make_shard


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO owns a parameter: partitioned itself (stage 3), or with partitioned masters (stages 1 and 2)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def shard_of(held: Held) -> Shard:
    """This process' stretch of a held parameter: of its float32 masters, or of its values where it is frozen."""
    parameter: Any = held.parameter
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    local, offset, group_size = (_stage_3 if hasattr(parameter, "ds_id") else _stages_1_and_2)(held)

    def cut(tensor: Tensor) -> Tensor:
        return tensor.flatten()[offset : offset + local.numel()]

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


def publish_masters(optimizer: Any) -> None:
    """Give the model the values of the masters, as after a step: each process its own stretch, then gathered."""
    zero = zero_optimizer(optimizer)
    if zero is None:
        raise ValueError("the optimizer is not one of DeepSpeed's ZeRO optimizers; its masters cannot be published")
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for at in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(at)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def pulls_of(shards: Sequence[Shard], starts: dict[str, Tensor]) -> Callable[[Tensor], list[tuple[Tensor, Tensor]]]:
    """For a flat master of the optimizer: the held stretches in it, each beside its start."""
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for shard in shards:
        if shard.name in starts and shard.parameter.numel():
            storage = shard.parameter.untyped_storage().data_ptr()
            parts.setdefault(storage, []).append((shard.parameter, starts[shard.name]))
    return lambda flat: parts.get(flat.untyped_storage().data_ptr(), [])


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
            raise ValueError(f"the masters of {held.name} are swapped out to disk; routeguard needs them in memory")
        at, begins, _ = zero.grad_position[zero.get_param_id(parameter)]
        local = zero.fp32_partitioned_groups_flat[at].detach().narrow(0, begins, stretch)
    return local[:count], offset, size
