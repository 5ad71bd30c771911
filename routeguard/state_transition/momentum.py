"""How the updates of finished steps add up to the state: momentum, as coefficients."""

from __future__ import annotations

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


def state_coefficients(num_steps: int, config: StateTransitionConfig) -> Tensor:
    """Coefficients `c` with `S_t = Σ_s c[t, s−1]·∇_s`, where `∇_s` is the plain sum of `kᵀv` over step s.

    The momentum is linear in the steps' updates, so the state before each step is a fixed combination of them:
    `S_t = S_{t−1} + (1−α_t)·∇_t + α_t·mean_{t−1}`.

    Args:
        num_steps: n.
        config: the momentum's settings; `running_mean` says whether the mean is of plain or of corrected updates.

    Returns: [n + 1, n], float64; row t is the state after t steps.

    Source: arXiv 2602.01198, momentum; the matrix form is derived.
    """
    own = torch.eye(num_steps, dtype=torch.float64)
    states = torch.zeros(num_steps + 1, num_steps, dtype=torch.float64)
    average = torch.zeros(num_steps, dtype=torch.float64)
    for step in range(1, num_steps + 1):
        alpha = momentum_weight(step, config)
        update = (1 - alpha) * own[step - 1] + alpha * average
        states[step] = states[step - 1] + update
        taken = update if config.running_mean == "corrected" else own[step - 1]
        average = average + (taken - average) / step
    return states
