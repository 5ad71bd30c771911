"""Add numbers to a Trainer's log lines, so that they reach `log_history` and every reporter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LogWrapper:
    """Wraps `trainer.log` on the instance: training log lines (those with a "loss") get the extra metrics.

    Mutating `logs` in `on_log` would reach neither the reporters that ran before nor `log_history`.
    """

    def __init__(self, trainer: Any, metrics: Callable[[], dict[str, float]]) -> None:
        self._trainer = trainer
        self._earlier = vars(trainer).get("log")
        original = trainer.log

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if "loss" in logs:
                logs = {**logs, **metrics()}
            return original(logs, *args, **kwargs)

        trainer.log = log

    def remove(self) -> None:
        if self._earlier is None:
            vars(self._trainer).pop("log", None)
        else:
            self._trainer.log = self._earlier
