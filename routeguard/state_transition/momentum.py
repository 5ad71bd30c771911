"""How the updates of finished steps add up to the state: momentum, as coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from routeguard.state_transition.config import StateTransitionConfig


def momentum_weight(step: int, config: StateTransitionConfig) -> float:
    """α of step t: `min(α_max, t/|T|)`; 0 for the first step, which has no past.

    Args:
        step: t, from 1.
        config: α_max, |T|, and which rule: "max" for the printed `max(α_max, t/|T|)`, 1 at most.

    Source: arXiv 2602.01198, momentum; see `StateTransitionConfig` for the two readings.
    """
    if step <= 1 or config.max_alpha == 0:
        return 0.0
    grown = step / config.max_steps
    return min(config.max_alpha, grown) if config.alpha_rule == "min" else min(max(config.max_alpha, grown), 1.0)


@dataclass(frozen=True)
class Coefficients:
    """How a state and the running mean follow from what was there before and from the sums `∇_s = Σ kᵀv` of n steps.

    Attributes:
        states, means: [n + 1, 2 + n], float64; row r is after r steps. The first two columns count the state and the
            mean from before, the others the steps' sums.
    """

    states: Tensor
    means: Tensor


@lru_cache(maxsize=8)
def coefficients(num_steps: int, config: StateTransitionConfig, finished: int = 0) -> Coefficients:
    """The momentum over some steps as coefficients: it is linear in the steps' sums.

    `S_t = S_{t−1} + (1−α_t)·∇_t + α_t·mean_{t−1}`, and the mean takes in each step's update.

    Args:
        num_steps: n.
        config: the momentum's settings; `running_mean` says whether the mean is of plain or of corrected updates.
        finished: steps before those n. Default 0; the state and the mean from before are then 0.

    Source: arXiv 2602.01198, momentum; the matrix form is derived.
    """
    own = torch.eye(num_steps + 2, dtype=torch.float64)
    states, means = [own[0]], [own[1]]
    for number in range(1, num_steps + 1):
        step = finished + number
        alpha, plain = momentum_weight(step, config), own[number + 1]
        update = (1 - alpha) * plain + alpha * means[-1]
        taken = update if config.running_mean == "corrected" else plain
        states.append(states[-1] + update)
        means.append(means[-1] + (taken - means[-1]) / step)
    return Coefficients(torch.stack(states), torch.stack(means))
