"""What is known of the drift at one step: plain numbers, without torch, so that a drift file is read without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from routeguard.routes.wording import as_printed

Cell = tuple[int, str]  # (layer, role)


@dataclass(frozen=True)
class DriftSample:
    """Drift at one step; `str()` is one line, the mean of each role and the largest.

    `factors` maps (layer, role) to ‖W − W₀‖ / ‖W₀‖ over that role's tensors. `routing` maps a layer to the relative
    drift of its logit form, one number for each query head; empty between log steps and for layers where the weights'
    product is not the logit.
    """

    step: int
    factors: Mapping[Cell, float]
    routing: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def of_role(self, role: str) -> float | None:
        """Mean over layers, or None if no tensor of this role is measured."""
        values = [value for (_, name), value in self.factors.items() if name == role]
        return sum(values) / len(values) if values else None

    def __str__(self) -> str:
        roles = dict.fromkeys(role for _, role in self.factors)
        text = ", ".join(f"{role} {self.of_role(role):.4g}" for role in roles)
        (layer, role), largest = max(self.factors.items(), key=lambda item: item[1], default=((0, ""), 0.0))
        top = f"; largest {largest:.4g} (layer {layer} {role})" if largest else ""
        return f"{text or 'nothing measured'}{top}, step {self.step}"

    _repr_pretty_ = as_printed
