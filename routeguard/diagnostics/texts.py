"""Text to measure on: a text file, a table of samples, or prose that Python itself ships."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_MOST_UNKNOWN = 0.05


def builtin_prose() -> str:
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
    refuse_many_unknown(tokenizer, ids[: room * num_sequences])
    return torch.tensor([start + ids[n * room : (n + 1) * room] for n in range(num_sequences)])


def refuse_many_unknown(tokenizer: Any, ids: Sequence[int]) -> None:
    """Raise ValueError where the tokenizer reads <unk> for over 5 % of a text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    share = 0.0 if unknown is None or not ids else sum(token == unknown for token in ids) / len(ids)
    if share > _MOST_UNKNOWN:
        raise ValueError(
            f"{share:.0%} of the text is unknown to this tokenizer ({tokenizer.unk_token}), so it would be measured on "
            "something else; give a text in its own language"
        )


def read_text(path: Path) -> str:
    """Content of a text file; ValueError, naming it, where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Samples of a dataset: a JSONL, JSON or parquet file, a plain text file, or a folder of `datasets.save_to_disk`.

    A text file is one sample. Raises ValueError for what cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        from datasets import DatasetDict, load_from_disk

        try:
            loaded = load_from_disk(str(path))
        except Exception as error:
            raise ValueError(f"{path} is not a folder of datasets.save_to_disk: {error}") from None
        if isinstance(loaded, DatasetDict):
            loaded = loaded["train"] if "train" in loaded else loaded[next(iter(loaded))]
        return [dict(row) for row in loaded]
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a dataset folder")
    if path.suffix == ".parquet":
        from datasets import Dataset

        try:
            return [dict(row) for row in Dataset.from_parquet(str(path))]
        except Exception as error:
            raise ValueError(f"{path} is not a parquet file that can be read: {error}") from None
    content = read_text(path)
    try:
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in content.split("\n") if line.strip()]
        elif path.suffix == ".json":
            rows = json.loads(content)
        else:
            rows = [{"text": content}]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no list of samples (objects with a text, messages or input_ids field)")
    return rows
