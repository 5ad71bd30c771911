"""How long the sequences are that a Trainer trains on."""

from __future__ import annotations

from typing import Any

_ROWS = 256


def training_length(args: Any, longest: int | None = None) -> int:
    """Tokens of the longest training sequence.

    Args:
        args: the Trainer's arguments; no sequence is longer than their `max_length` (TRL), where it is set.
        longest: tokens of the longest row (`longest_row`), where the rows can be read.

    Raises ValueError where neither tells.
    """
    limit = getattr(args, "max_length", None) or getattr(args, "max_seq_length", None)
    known = [n for n in (limit, longest) if isinstance(n, int) and n > 0]
    if not known:
        raise ValueError("the training length is not known (no max_length, no input_ids in the dataset): give lengths=")
    return min(known)


def longest_row(dataloader: Any) -> int | None:
    """Tokens of the longest of up to 256 rows from all over the dataset; None where they cannot be read."""
    return max(_row_tokens(dataloader), default=0) or None


def mean_row_tokens(dataloader: Any) -> float | None:
    """Mean tokens of a training row, over up to 256 rows from all over the dataset; None where they cannot be read."""
    rows = _row_tokens(dataloader)
    return sum(rows) / len(rows) if any(rows) else None


def _row_tokens(dataloader: Any) -> list[int]:
    """Tokens of 256 rows spread evenly; nothing for a stream or rows without `input_ids`."""
    dataset = getattr(dataloader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return []
    count = min(_ROWS, len(dataset))
    rows = (dataset[i * len(dataset) // count] for i in range(count))
    return [len(row["input_ids"]) for row in rows if isinstance(row, dict) and "input_ids" in row]
