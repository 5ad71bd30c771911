"""Rows of real traces with marked steps, as the trainers read them."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset

from routeguard.state_transition.data import mark_steps
from routeguard.state_transition.step_marks import StepMarks

MIN_WORDS, MAX_TOKENS = 4, 320


def marked_rows(rows: Dataset, tokenizer: Any, marks: StepMarks, words: tuple[str, ...]) -> tuple[Dataset, Any]:
    """Token ids and labels of traces with marked steps, and what was found in them."""
    marked = mark_steps(rows, tokenizer, marks, words=words, min_words=MIN_WORDS)
    ids, labels = [], []
    for row in marked.dataset:
        prompt = tokenizer(row["prompt"]).input_ids
        completion = tokenizer(row["completion"], add_special_tokens=False).input_ids
        if len(prompt) + len(completion) <= MAX_TOKENS:
            ids.append(prompt + completion)
            labels.append([-100] * len(prompt) + completion)
    return Dataset.from_dict({"input_ids": ids, "labels": labels}), marked


def in_like_batches(rows: Dataset, batch: int, *, seed: int) -> Dataset:
    """The rows in an order in which each batch has rows of like length (little padding), batches at random."""
    lengths = [len(ids) for ids in rows["input_ids"]]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    random.Random(seed).shuffle(batches)
    return rows.select([row for one in batches for row in one])


def without_marks(rows: Dataset, step_ids: tuple[int, ...]) -> Dataset:
    """The same rows as the base model reads them: no step tokens."""
    kept = [[i for i, token in enumerate(row["input_ids"]) if token not in step_ids] for row in rows]
    columns = {
        name: [[row[name][i] for i in places] for row, places in zip(rows, kept, strict=True)]
        for name in ("input_ids", "labels")
    }
    return Dataset.from_dict(columns)
