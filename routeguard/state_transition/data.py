"""Turn a dataset of reasoning traces into one whose steps are marked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from routeguard.plots import COLOURS, finish, new_figure, tidy
from routeguard.routes.wording import as_printed
from routeguard.state_transition.patterns import Patterns, cluster_patterns, embed_steps
from routeguard.state_transition.segment import TRANSITION_WORDS, segment_steps
from routeguard.state_transition.step_marks import StepMarks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MarkedSteps:
    """A dataset whose reasoning is in marked steps, and what was found.

    Attributes:
        dataset: the rows, with the completion rewritten; other columns as they were.
        patterns: the thinking patterns; None with a single start token.
        step_tokens: [steps], tokens of each step, its marks not counted.
        trace_steps: [rows], steps of each row.
        sample: a row's steps, to look at.
    """

    dataset: Any
    patterns: Patterns | None
    step_tokens: NDArray[np.int64]
    trace_steps: NDArray[np.int64]
    sample: tuple[str, ...]

    def __str__(self) -> str:
        tokens, steps = self.step_tokens, self.trace_steps
        about = [
            f"{len(steps)} traces, {len(tokens)} steps: {steps.mean():.1f} a trace ({steps.min()} to {steps.max()}), "
            f"{tokens.mean():.0f} tokens a step (longest {tokens.max()})"
        ]
        if self.patterns is not None:
            about.append(str(self.patterns))
        about += [f"  {number}. {step.strip()[:100]!r}" for number, step in enumerate(self.sample[:8], 1)]
        return "\n".join(about)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """How long steps are, and how many a trace has; written to `path` if given."""
        figure, (left, right) = new_figure(1, 2, width=8, height=3)
        left.hist(self.step_tokens, bins=min(40, max(5, int(self.step_tokens.max()))), color=COLOURS[0])
        left.axvline(float(np.median(self.step_tokens)), color=COLOURS[1], linestyle="--", label="median")
        left.set_xlabel("tokens of a step")
        left.set_ylabel("steps")
        left.legend(frameon=False)
        values, counts = np.unique(self.trace_steps, return_counts=True)
        right.bar(values, counts, color=COLOURS[2])
        right.set_xlabel("steps of a trace")
        right.set_ylabel("traces")
        tidy(left)
        tidy(right)
        return finish(figure, path)


def mark_steps(
    dataset: Any,
    tokenizer: Any,
    marks: StepMarks,
    *,
    model: Any = None,
    patterns: Patterns | None = None,
    words: Iterable[str] = TRANSITION_WORDS,
    min_words: int = 8,
    max_words: int = 256,
    max_step_tokens: int = 1024,
    column: str = "completion",
    answer_after: str = "</think>",
    seed: int = 0,
) -> MarkedSteps:
    """Mark the steps of every trace in a dataset.

    In `column`, what stands before `answer_after` (or all, where that does not occur) is the reasoning: it is cut by
    `segment_steps`, and each step wrapped in tokens. What follows is the answer and stays plain. With several start
    tokens a step gets that of its thinking pattern, found by clustering all steps (or by `patterns`, made earlier).

    Args:
        dataset: of `datasets`, with a text column.
        tokenizer: with the step tokens (`add_step_tokens`).
        marks: those.
        model: that embeds steps; needed with several start tokens.
        patterns: of another dataset, to use again.
        words, min_words, max_words: as in `segment_steps`.
        max_step_tokens: the longest step that generation will allow; longer ones are refused. Default 1024.
        column: the text column. Default "completion".
        answer_after: what ends the reasoning; it becomes part of the last step.
        seed: of the clustering.

    Raises ValueError for a missing column, a tokenizer without the step tokens, a trace without words (the row is
    named), steps that are too long, step tokens that stand in a text already, and several start tokens without a model.
    """
    names = dataset.column_names
    if isinstance(names, dict):
        raise ValueError(f"this is a DatasetDict; choose one of its splits {list(names)}")
    names = list(names or [])
    if column not in names:
        raise ValueError(f"the dataset has no column {column!r}; there are {names}")
    marks.check(tokenizer)
    several = len(marks.starts) > 1
    if several and model is None:
        raise ValueError(f"{len(marks.starts)} start tokens need a model that embeds the steps: model=")
    words = tuple(words)
    checked = [dataset[name] for name in ("prompt", column) if name in names]
    for row, both in enumerate(zip(*checked, strict=True)):
        _check_texts(both, marks, row)
    cut = [_cut(text, answer_after, words, min_words, max_words, row) for row, text in enumerate(dataset[column])]
    if not cut:
        raise ValueError("the dataset has no rows")
    steps = [step for of_row, _ in cut for step in of_row]
    lengths = np.array([len(tokenizer(step, add_special_tokens=False).input_ids) for step in steps])
    counts = np.array([len(of_row) for of_row, _ in cut])
    if int(lengths.max()) + 2 > max_step_tokens:
        row = int(np.searchsorted(np.cumsum(counts), int(lengths.argmax()), side="right"))
        raise ValueError(
            f"row {row} has a step of {lengths.max()} tokens, with its marks more than max_step_tokens="
            f"{max_step_tokens}; allow longer ones, or cut finer (max_words={max_words})"
        )
    labels = np.zeros(len(steps), dtype=np.int64)
    if several:
        embeddings = embed_steps(model, tokenizer, steps)
        patterns = patterns or cluster_patterns(embeddings, num_patterns=len(marks.starts), seed=seed)
        if patterns.num_patterns != len(marks.starts):
            raise ValueError(f"{patterns.num_patterns} patterns do not fit {len(marks.starts)} start tokens")
        labels = patterns.of(embeddings)
    wrapped = iter(marks.wrap(step, int(label)) for step, label in zip(steps, labels, strict=True))
    texts = ["".join(next(wrapped) for _ in of_row) + answer for of_row, answer in cut]
    rewritten = dataset.map(lambda _, row: {column: texts[row]}, with_indices=True)
    return MarkedSteps(rewritten, patterns if several else None, lengths, counts, tuple(cut[0][0]))


def _check_texts(texts: tuple[Any, ...], marks: StepMarks, row: int) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"row {row} holds a {type(text).__name__} where a text is expected; apply the chat template first"
            )
        inside = [mark for mark in (*marks.starts, marks.end) if mark in text]
        if inside:
            raise ValueError(f"row {row} holds the step tokens {inside} already: {text[:60]!r}")


def _cut(
    text: str, answer_after: str, words: tuple[str, ...], min_words: int, max_words: int, row: int
) -> tuple[list[str], str]:
    before, mark, answer = text.partition(answer_after)
    try:
        steps = segment_steps(before + mark, words=words, min_words=min_words, max_words=max_words)
    except ValueError as error:
        raise ValueError(f"row {row}: {error}") from error
    return steps, answer
