"""Tokens to measure on: from a text file, a table of samples, or prose that Python itself ships."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TEXT_COLUMNS = ("text", "content", "completion", "response", "output")


def builtin_prose() -> str:
    """English prose of about 70 thousand words: Python's own documentation topics. No download."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def token_rows(tokenizer: Any, text: str, *, num_tokens: int, num_sequences: int = 1) -> Tensor:
    """Consecutive stretches of a text as tokens: [num_sequences, num_tokens], each with the start mark if there is one.

    Raises ValueError for a text that is too short.
    """
    import torch

    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = num_tokens - len(start)
    if room < 1 or num_sequences < 1:
        raise ValueError(f"{num_sequences} sequences of {num_tokens} tokens asked for; give at least one of 2 tokens")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < room * num_sequences:
        raise ValueError(
            f"the text has {len(ids)} tokens; {num_sequences} × {num_tokens} asked for. Ask for less, or give more text"
        )
    return torch.tensor([start + ids[n * room : (n + 1) * room] for n in range(num_sequences)])


def read_samples(path: str | Path) -> list[dict[str, Any]]:
    """Samples of a dataset: a JSONL, JSON or parquet file, a plain text file, or a folder of `datasets.save_to_disk`.

    A text file is one sample. Raises ValueError for what cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        from datasets import DatasetDict, load_from_disk

        loaded = load_from_disk(str(path))
        if isinstance(loaded, DatasetDict):
            loaded = loaded["train"] if "train" in loaded else loaded[next(iter(loaded))]
        return [dict(row) for row in loaded]
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a dataset folder")
    if path.suffix == ".parquet":
        from datasets import Dataset

        return [dict(row) for row in Dataset.from_parquet(str(path))]
    content = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
        elif path.suffix == ".json":
            rows = json.loads(content)
        else:
            rows = [{"text": content}]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no list of samples (objects with a text, messages or input_ids field)")
    return rows


def sample_tokens(
    tokenizer: Any, samples: Iterable[Mapping[str, Any]], *, column: str | None = None
) -> list[Sequence[int]]:
    """Token ids of each sample, as training would see them.

    A sample is read, in this order, from `column` if given, `input_ids`, `messages` (chat template, or contents joined
    by newlines where the tokenizer has none), `prompt` with `completion`, or a text column.

    Raises ValueError for a sample without any of these.
    """
    return [_tokens(tokenizer, sample, column) for sample in samples]


def sample_labels(
    tokenizer: Any, samples: Sequence[Mapping[str, Any]], documents: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """Labels of `sample_tokens`' documents: a `labels` field, or prompts left out (−100); None where all count."""
    if all(sample.get("labels") for sample in samples):
        return [[int(label) for label in sample["labels"]] for sample in samples]
    if not all(isinstance(sample.get("prompt"), str) and sample.get("completion") for sample in samples):
        return None
    found = []
    for sample, document in zip(samples, documents, strict=True):
        prompt = min(len(tokenizer(sample["prompt"])["input_ids"]), len(document))
        found.append([-100] * prompt + list(document[prompt:]))
    return found


def _tokens(tokenizer: Any, sample: Mapping[str, Any], column: str | None) -> Sequence[int]:
    if column is not None:
        if column not in sample:
            raise ValueError(f"no column {column!r} in a sample; it has {list(sample)}")
        value = sample[column]
    else:
        known = ("input_ids", "messages", "conversations", "prompt", *TEXT_COLUMNS)
        name = next((name for name in known if sample.get(name)), None)
        if name is None:
            raise ValueError(
                f"a sample has none of the columns {', '.join(known)}; it has {list(sample)}: name the column"
            )
        value = sample[name]
        if name == "prompt" and sample.get("completion"):
            value = _joined(value, sample["completion"])
    if isinstance(value, str):
        return list(tokenizer(value)["input_ids"])
    if value and isinstance(value[0], Mapping):
        if getattr(tokenizer, "chat_template", None):
            return list(tokenizer.apply_chat_template(value, tokenize=True, return_dict=False))
        return list(tokenizer("\n".join(str(turn["content"]) for turn in value))["input_ids"])
    return [int(token) for token in value]


def _joined(prompt: Any, completion: Any) -> Any:
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return [*prompt, *completion]
