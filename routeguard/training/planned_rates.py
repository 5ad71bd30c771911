"""How far a run's learning rates add up, before its first step: what a pull of the whole run is divided by."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def planned_rates(optimizer: Optimizer, scheduler: Any, num_steps: int) -> float:
    """The learning rates of all steps of a run, added up; those of the first parameter group.

    Args:
        optimizer: the run's.
        scheduler: its schedule, from its first step on (also when it is resumed); None is a constant rate.
        num_steps: optimizer steps of the whole run.

    Raises ValueError for a schedule that does not say its rates beforehand (reduce_lr_on_plateau).
    """
    if scheduler is None:
        return float(optimizer.param_groups[0]["lr"]) * num_steps
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"L2SP spreads its pull over the run by the learning rate, and {type(scheduler).__name__} does not say its "
            "rates beforehand; use a schedule such as linear, cosine or constant, or Anchor(strength)"
        )
    share = scheduler.lr_lambdas[0]
    return float(scheduler.base_lrs[0]) * sum(float(share(step)) for step in range(num_steps))
