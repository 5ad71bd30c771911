"""Settings that make no sense are refused where they are given, before anything is loaded, made or trained."""

from __future__ import annotations

import operator
from typing import Any


def check_lengths(lengths: Any) -> tuple[int, ...]:
    """Context lengths as a tuple of whole numbers.

    Raises ValueError for what is no sequence of them, for none at all, and for lengths below 1.
    """
    if isinstance(lengths, str) or not hasattr(lengths, "__iter__"):
        raise ValueError(f"lengths={lengths!r}: give a sequence of whole numbers of tokens, such as lengths=(4096,)")
    found = tuple(_whole(length) for length in lengths)
    if not found or min(found) < 1:
        raise ValueError(f"give lengths of at least 1 token, and one of them at least; got {found}")
    return found


def check_at_least_one(name: str, number: Any) -> None:
    """Raise ValueError for a count that is below 1 or no whole number."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or number < 1:
        raise ValueError(f"{name}={number!r}: give a whole number, 1 at least")


def check_probe(every: int | None, share: float, max_drop: float | None, action: str) -> None:
    """Raise ValueError for what a probe cannot do."""
    if every is not None and every < 1:
        raise ValueError(f"every={every} steps; give at least 1, or None to keep the cost below share={share}")
    if not 0 < share <= 1:
        raise ValueError(f"share={share} of the training time; it lies above 0 and up to 1")
    if action not in ("warn", "stop"):
        raise ValueError(f"no action {action!r}; there are 'warn' and 'stop'")
    if max_drop is not None and not 0 < max_drop <= 1:
        raise ValueError(f"max_drop={max_drop}; accuracies lie between 0 and 1, so give 0.1 for ten points")
    if action == "stop" and max_drop is None:
        raise ValueError(
            "action='stop' without max_drop never stops: say how far recall may fall, max_drop=0.2 for twenty points"
        )


def _whole(length: Any) -> int:
    """A length as a plain int: NumPy's whole numbers too, no float, text or truth value."""
    try:
        if not isinstance(length, bool):
            return operator.index(length)
    except TypeError:
        pass
    raise ValueError(f"length {length!r} is not a whole number of tokens; give numbers such as 4096")
