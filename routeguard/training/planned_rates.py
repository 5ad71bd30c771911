"""How far a run's learning rates add up, before its first step: what a pull of the whole run is divided by."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def planned_rates(optimizer: Optimizer, scheduler: Any, num_steps: int) -> float:
    """The learning rates of all steps of a run, added up; of several parameter groups, those of the fastest.

    So no weight is pulled by more than was asked for, in whichever order the groups are. Groups without anything
    trainable do not count.

    Args:
        optimizer: the run's.
        scheduler: its schedule, from its first step on (also when it is resumed); None is a constant rate.
        num_steps: optimizer steps of the whole run.

    Raises ValueError for a schedule that does not say its rates beforehand (reduce_lr_on_plateau).
    """
    moving = [any(p.requires_grad for p in group["params"]) for group in optimizer.param_groups]
    if scheduler is None:
        rates = [float(group["lr"]) * num_steps for group in optimizer.param_groups]
    else:
        rates = _scheduled(getattr(scheduler, "scheduler", scheduler), num_steps)  # accelerate wraps it
    return max((rate for rate, moves in zip(rates, moving, strict=False) if moves), default=0.0)


def _scheduled(scheduler: Any, num_steps: int) -> list[float]:
    """For each group."""
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"L2SP spreads its pull over the run by the learning rate, and {type(scheduler).__name__} does not say its "
            "rates beforehand; use a schedule such as linear, cosine or constant, or Anchor(strength)"
        )
    lambdas = {id(share): share for share in scheduler.lr_lambdas}  # groups mostly have one in common
    shares = {key: sum(float(share(step)) for step in range(num_steps)) for key, share in lambdas.items()}
    return [
        float(rate) * shares[id(share)] for rate, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
