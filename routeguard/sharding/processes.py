"""Sums and agreements over all processes; the identity in a single one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_T = TypeVar("_T")


def in_several_processes() -> bool:
    """Whether a process group with more than one member exists."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first_process() -> bool:
    """Whether this process has rank 0, or is the only one."""
    return not in_several_processes() or torch.distributed.get_rank() == 0


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of every process' tensor, on all of them. Every process must call it."""
    if in_several_processes():
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)
    return tensor


def from_the_first(value: Any) -> Any:
    """The first process' value, on all of them. Every process must call it."""
    if not in_several_processes():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def done_by_the_first(task: Callable[[], _T]) -> _T:
    """What a task gives in the first process, on all of them; its ValueError is raised on all of them."""
    result, failure = None, ""
    if is_first_process():
        try:
            result = task()
        except ValueError as error:
            failure = str(error)
    failure, result = from_the_first((failure, result))
    if failure:
        raise ValueError(failure)
    return cast(_T, result)
