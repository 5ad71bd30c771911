"""Text to measure on: a text file, or prose that Python itself ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeguard.recall.encoding import MOST_UNKNOWN, share_unknown

if TYPE_CHECKING:
    from torch import Tensor


def manual_text() -> str:
    """English prose of about 70 thousand words: Python's own documentation topics. No download."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def token_rows(tokenizer: Any, text: str, *, num_tokens: int, num_sequences: int = 1) -> Tensor:
    """Consecutive stretches of a text as tokens: [num_sequences, num_tokens], each with the start mark if there is one.

    Raises ValueError for a text that is too short, or in a language that the tokenizer does not know.
    """
    import torch

    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = num_tokens - len(start)
    if room < 1 or num_sequences < 1:
        raise ValueError(f"{num_sequences} × {num_tokens} tokens asked for; give at least one sequence of 2")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < room * num_sequences:
        raise ValueError(
            f"the text has {len(ids)} tokens; {num_sequences} × {num_tokens} asked for. Ask for less, or give more text"
        )
    remedy = "give a text in its own language (at the command line: --text FILE)"
    refuse_many_unknown(tokenizer, ids[: room * num_sequences], remedy)
    return torch.tensor([start + ids[n * room : (n + 1) * room] for n in range(num_sequences)])


def refuse_many_unknown(tokenizer: Any, ids: Sequence[int], remedy: str) -> None:
    """Raise ValueError, which ends with the remedy, where the tokenizer reads <unk> for over 5 % of a text."""
    share = share_unknown(tokenizer, ids)
    if share > MOST_UNKNOWN:
        raise ValueError(
            f"{share:.0%} of the text is unknown to this tokenizer ({tokenizer.unk_token}), so it would be measured on "
            f"something else; {remedy}"
        )


def read_text(path: Path) -> str:
    """Content of a text file; ValueError, naming it, where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
