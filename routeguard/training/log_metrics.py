"""Add the drift to a Trainer's log lines, so that they reach `log_history` and every reporter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routeguard.drift.sample import DriftSample
from routeguard.training.wrapping import Wrapped


class LogWrapper:
    """Wraps `trainer.log` on the instance: training log lines (those with a "loss") get the extra metrics.

    Mutating `logs` in `on_log` would reach neither the reporters that ran before nor `log_history`. `has_added` says
    whether there was such a line.
    """

    def __init__(self, trainer: Any, metrics: Callable[[], dict[str, float]]) -> None:
        self.has_added = False
        self._metrics = metrics
        self._wrapped = Wrapped(trainer, "log", self._log)

    def _log(self, original: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            added = self._metrics()
            self.has_added |= bool(added)
            logs = {**logs, **added}
        return original(logs, *args, **kwargs)

    def remove(self) -> None:
        self._wrapped.remove()


def flat_metrics(sample: DriftSample) -> dict[str, float]:
    """A sample as reporter metrics: mean drift by role, the largest, and the logit form's mean and largest head."""
    metrics = {}
    for role in dict.fromkeys(role for _, role in sample.factors):
        mean = sample.of_role(role)
        if mean is not None:
            metrics[f"routeguard/drift_{role}"] = mean
    if sample.factors:
        metrics["routeguard/drift_max"] = max(sample.factors.values())
    heads = [value for layer in sample.routing.values() for value in layer]
    if heads:
        metrics["routeguard/routing_drift"] = sum(heads) / len(heads)
        metrics["routeguard/routing_drift_max"] = max(heads)
    return metrics
