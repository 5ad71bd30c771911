"""What is known about optimizers: which treat every entry alone, which have no learning rate to scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from routeguard.routes.wording import first_of

_TORCH = ["SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop"]
_PAGED = ["PagedAdam", "PagedAdamW", "PagedLion"]
_BITSANDBYTES = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Lion", "AdEMAMix", *_PAGED]

_DEEPSPEED = ["FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"]

# Update of an entry depends on that entry's gradient and state alone (8-bit variants: on its quantisation block).
ELEMENTWISE = frozenset(
    [*_TORCH, *_BITSANDBYTES, "PagedAdEMAMix", *(f"{name}32bit" for name in _BITSANDBYTES), *_DEEPSPEED]
)
_BLOCKWISE = frozenset(f"{name}8bit" for name in [*_BITSANDBYTES, "PagedAdEMAMix"])
# torch's own, for which views of one tensor are proved bit-equal to separate tensors in the tests.
VIEW_EXACT = frozenset(["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"])
_WITHOUT_LEARNING_RATE = ("prodigy", "dadapt", "schedulefree", "schedule_free", "lomo", "mechanic", "dowg", "cocob")


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside the wrappers of accelerate and DeepSpeed."""
    wrappers = ("AcceleratedOptimizer", "DeepSpeedOptimizerWrapper")  # themselves torch optimizers by class
    while not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ in wrappers:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is not a torch optimizer and wraps none; cannot protect its steps"
        )
    return optimizer


def refuse_row_mixing_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], mode: str) -> None:
    """Raise unless the optimizer treats rows independently (needed as soon as a tensor is held in part)."""
    kind = type(optimizer).__name__
    if kind in ELEMENTWISE or kind in _BLOCKWISE:
        return
    raise ValueError(
        f"{mode} holds only some rows of {first_of(names, 'tensors')}, and optimizer {kind} is not "
        "known to treat rows independently: holding some would change how the others learn. Use one of "
        f"{', '.join(sorted(ELEMENTWISE)[:8])} …, or hold whole tensors only"
    )


def refuse_inexact_views(optimizer: torch.optim.Optimizer, names: Sequence[str], mode: str) -> None:
    """Raise unless the optimizer, given views of a tensor's rows, equals one given separate tensors bit for bit."""
    kind = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and kind in VIEW_EXACT:
        return
    raise ValueError(
        f"{mode} must treat some rows of {first_of(names, 'tensors')} apart from the rest, which is "
        f"exact only with {', '.join(sorted(VIEW_EXACT))} of torch.optim, not with {kind} from "
        f"{type(optimizer).__module__}; use one of these, or protect=Freeze()"
    )


def refuse_rate_free_optimizer(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Raise for optimizers that choose their own step size: scaling or reading their learning rate means nothing."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}".lower()
    free = any(word in kind.replace("_", "") for word in (w.replace("_", "") for w in _WITHOUT_LEARNING_RATE))
    relative = any(group.get("relative_step") for group in optimizer.param_groups)
    missing = any(group.get("lr") is None for group in optimizer.param_groups)
    if free or relative or missing:
        raise ValueError(
            f"{mode} works through the learning rate, and {type(optimizer).__name__} sets its own step size; use an "
            "optimizer with a learning rate, or protect=Freeze()"
        )
