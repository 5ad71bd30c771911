"""States are long sums: they are never accumulated in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run the function in the dtypes that it chooses, whatever autocast is on around it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for device in ("cuda", "cpu"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
