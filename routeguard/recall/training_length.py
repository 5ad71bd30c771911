"""How long the sequences are that a Trainer trains on."""

from __future__ import annotations

from typing import Any

_ROWS = 256


def training_length(args: Any, dataloader: Any = None) -> int:
    """Tokens of the longest training sequence.

    Args:
        args: the Trainer's arguments; `max_length` (TRL) is the answer where it is set.
        dataloader: otherwise the longest `input_ids` among the first 256 rows of its dataset.

    Raises ValueError where neither tells.
    """
    length = getattr(args, "max_length", None) or getattr(args, "max_seq_length", None)
    if isinstance(length, int) and length > 0:
        return length
    longest = max(_row_tokens(dataloader, spread=False), default=0)
    if not longest:
        raise ValueError("the training length is not known (no max_length, no input_ids in the dataset): give lengths=")
    return longest


def mean_row_tokens(dataloader: Any) -> float | None:
    """Mean tokens of a training row, over up to 256 rows from all over the dataset; None where they cannot be read."""
    rows = _row_tokens(dataloader, spread=True)
    return sum(rows) / len(rows) if any(rows) else None


def _row_tokens(dataloader: Any, *, spread: bool) -> list[int]:
    """Tokens of the first 256 rows, or of 256 rows spread evenly; nothing for a stream or rows without `input_ids`."""
    dataset = getattr(dataloader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return []
    count = min(_ROWS, len(dataset))
    rows = (dataset[i * len(dataset) // count if spread else i] for i in range(count))
    return [len(row["input_ids"]) for row in rows if isinstance(row, dict) and "input_ids" in row]
