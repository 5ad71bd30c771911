"""Reading a parameter that an engine may have split over processes: the local part, or all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_distributed_tensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, as under FSDP2 and tensor parallelism."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a parameter as the model was written, also where ZeRO-3 has left an empty one here."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


@torch.no_grad()
def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local part, in its memory; any other tensor itself. No gradient flows through it."""
    if is_distributed_tensor(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor.detach()


@torch.no_grad()
def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a DTensor, or of a parameter under ZeRO-3, gathered from every process, each of which must call it.

    Any other tensor itself.
    """
    if is_distributed_tensor(tensor):
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    elif hasattr(tensor, "ds_id"):
        from routeguard.sharding.zero import gathered

        tensor = gathered(tensor)
    return tensor.detach()
