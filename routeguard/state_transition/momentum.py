"""How the updates of finished steps add up to the state: momentum, as coefficients."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.state_transition.config import AlphaRule, RunningMean


def momentum_weight(step: int, *, max_alpha: float, max_steps: int, rule: AlphaRule = "min") -> float:
    """α of step t: `min(α_max, t/|T|)`; 0 for the first step, which has no past.

    Args:
        step: t, from 1.
        max_alpha, max_steps: α_max and |T|.
        rule: "max" for the printed `max(α_max, t/|T|)`, 1 at most.

    Source: arXiv 2602.01198, momentum; see `StateTransitionConfig` for the two readings.
    """
    if step <= 1 or max_alpha == 0:
        return 0.0
    grown = step / max_steps
    return min(max_alpha, grown) if rule == "min" else min(max(max_alpha, grown), 1.0)


def state_coefficients(
    num_steps: int, *, max_alpha: float, max_steps: int, rule: AlphaRule = "min", mean: RunningMean = "raw"
) -> Tensor:
    """Coefficients `c` with `S_t = Σ_s c[t, s−1]·∇_s`, where `∇_s` is the plain sum of `kᵀv` over step s.

    The momentum is linear in the steps' updates, so the state before each step is a fixed combination of them:
    `S_t = S_{t−1} + (1−α_t)·∇_t + α_t·mean_{t−1}`.

    Args:
        num_steps: n.
        max_alpha, max_steps, rule: as in `momentum_weight`.
        mean: the running mean is of the plain updates ("raw") or of the corrected ones.

    Returns: [n + 1, n], float64; row t is the state after t steps.

    Source: arXiv 2602.01198, momentum; the matrix form is derived.
    """
    own = torch.eye(num_steps, dtype=torch.float64)
    states = torch.zeros(num_steps + 1, num_steps, dtype=torch.float64)
    average = torch.zeros(num_steps, dtype=torch.float64)
    for step in range(1, num_steps + 1):
        alpha = momentum_weight(step, max_alpha=max_alpha, max_steps=max_steps, rule=rule)
        update = (1 - alpha) * own[step - 1] + alpha * average
        states[step] = states[step - 1] + update
        average = average + ((update if mean == "corrected" else own[step - 1]) - average) / step
    return states
