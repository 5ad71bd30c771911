"""Measurements that failed during a training: said once, counted, and given up after three in a row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

MOST_IN_A_ROW = 3
_LONGEST_REASON = 300  # characters


@dataclass(frozen=True)
class Failure:
    """A measurement that raised: at which step, why, and whether it was the one after a restore."""

    step: int
    reason: str
    restored: bool = False


@dataclass
class Failures:
    """All failures of one training.

    Attributes:
        found: the failures in order.
        num_in_a_row: how many since the last success.
    """

    found: list[Failure] = field(default_factory=list)
    num_in_a_row: int = 0

    @property
    def given_up(self) -> bool:
        return self.num_in_a_row >= MOST_IN_A_ROW

    def at(self, step: int) -> bool:
        """Whether the measurement of that step was tried and failed."""
        return any(failure.step == step and not failure.restored for failure in self.found)

    def add(self, step: int, error: Exception, *, restored: bool) -> Failure:
        """Note one, and warn if it is the first. The exception itself is not kept: its frames may hold tensors."""
        failure = Failure(step, reason_of(error), restored)
        self.found.append(failure)
        self.num_in_a_row += 1
        if len(self.found) == 1:
            warnings.warn(
                f"the recall measurement at step {step} failed: {failure.reason}. The training goes on as without it; "
                f"it is tried again at the next one's time, and given up after {MOST_IN_A_ROW} failures in a row",
                stacklevel=3,
            )
        return failure

    def succeeded(self) -> None:
        self.num_in_a_row = 0

    def __str__(self) -> str:
        if not self.found:
            return ""
        reasons: dict[str, list[str]] = {}
        for failure in self.found:
            where = f"{failure.step} (after the restore)" if failure.restored else str(failure.step)
            reasons.setdefault(failure.reason, []).append(where)
        text = "; ".join(f"at step {', '.join(steps)}: {reason}" for reason, steps in reasons.items())
        end = f"; given up after {MOST_IN_A_ROW} in a row" if self.given_up else ""
        return f"{len(self.found)} measurements FAILED, {text}{end}"


def reason_of(error: Exception) -> str:
    """Type and message of an exception in one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def release_memory(error: Exception) -> None:
    """After an accelerator ran out of memory: give back what the failed pass had taken, before the training goes on."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        error.__traceback__ = None  # its frames hold the tensors
        torch.cuda.empty_cache()
