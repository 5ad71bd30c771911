"""What a fine-tuning run does: one frozen object, which also says which conditions can share a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.lab.language.needles import REPLAYED
from routeguard.protect.modes import L2SP, Protection

Lora = Literal["all", "without_qk"]


@dataclass(frozen=True)
class Training:
    """How a model is fine-tuned. The defaults are plain supervised fine-tuning.

    Attributes:
        protect: a mode of `RouteGuard`, or None for no guard.
        replay: share of the samples that are needles.
        replayed: their kinds.
        routing_rate: rate of queries and keys relative to the rest.
        trust_radius: greatest relative distance of a query or key matrix from its start, or None.
        settle_at: share of the steps after which queries and keys go back and stay, or None.
        rate: learning rate relative to the architecture's.
        steps: number of steps relative to the experiment's.
        words: most words of a sample; a step sees the same number of words all the same.
        lora: adapters on all linear layers, or on all but routing, or None for full fine-tuning.
    """

    protect: Protection | None = None
    replay: float = 0.0
    replayed: tuple[str, ...] = tuple(kind.name for kind in REPLAYED)
    routing_rate: float = 1.0
    trust_radius: float | None = None
    settle_at: float | None = None
    rate: float = 1.0
    steps: float = 1.0
    words: int = 95
    lora: Lora | None = None

    def __post_init__(self) -> None:
        mechanisms = (
            self.routing_rate != 1.0,
            self.trust_radius is not None,
            self.settle_at is not None,
        )
        if self.lora is not None and (any(mechanisms) or not isinstance(self.protect, L2SP | None)):
            raise ValueError("with LoRA the lab knows no other protection than L2SP; give it, replay and rates only")
        if sum(mechanisms) + (self.protect is not None) > 1:
            raise ValueError(
                "protect, routing_rate, trust_radius and settle_at act on the same weights: give one of them"
            )

    def settings(self) -> dict[str, Any]:
        """What differs from plain fine-tuning, as JSON."""
        plain = asdict(Training())
        found = {name: value for name, value in asdict(self).items() if value != plain[name] and name != "protect"}
        if not self.replay:
            found.pop("replayed", None)
        if self.protect is not None:
            found["protect"] = {"mode": self.protect.name, **vars(self.protect)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
