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
    dataset = getattr(dataloader, "dataset", None)
    longest = 0
    if dataset is not None and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        for index in range(min(_ROWS, len(dataset))):
            row = dataset[index]
            if isinstance(row, dict) and "input_ids" in row:
                longest = max(longest, len(row["input_ids"]))
    if not longest:
        raise ValueError("the training length is not known (no max_length, no input_ids in the dataset): give lengths=")
    return longest
