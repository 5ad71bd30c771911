"""The result of a recall measurement: cells with intervals, failures by depth, JSON, a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from routeguard.recall.intervals import wilson
from routeguard.recall.scores import SampleScore, ValueScore
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Cell:
    """Accuracy of one group of samples.

    Attributes:
        label: what groups them, for example `("niah_single_2", 4096)`.
        count: number of samples.
        accuracy: mean share of right values, 0 to 1, with `low` and `high` its 95 % interval (Wilson).
        close, other: shares of the values that are near misses: a character or two off; another value of the text.
        token_accuracy, nll: means over teacher-forced samples; None when generated.
    """

    label: tuple[str | int, ...]
    count: int
    accuracy: float
    low: float
    high: float
    close: float
    other: float
    token_accuracy: float | None
    nll: float | None


@dataclass(frozen=True)
class RecallResult:
    """All samples of a measurement.

    Attributes:
        scores: one per sample.
        settings: how they were made: tasks, lengths, seed, method, model, haystack and so on.
        notes: what a reader should know, in sentences.
    """

    scores: tuple[SampleScore, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(score.task for score in self.scores))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({score.length_tokens for score in self.scores}))

    def accuracy(self, *, task: str | None = None, length: int | None = None) -> float:
        """Mean share of right values, 0 to 1, over all tasks or one, all lengths or one.

        Raises ValueError if nothing was measured there.
        """
        chosen = [s for s in self.scores if task in (None, s.task) and length in (None, s.length_tokens)]
        if not chosen:
            raise ValueError(
                f"nothing measured for task {task} at length {length}; there are {self.tasks}, {self.lengths}"
            )
        return fmean(score.score for score in chosen)

    def cells(self) -> list[Cell]:
        """Accuracy by task and length."""
        return self._grouped(lambda s: (s.task, s.length_tokens))

    def by_length(self) -> list[Cell]:
        """Accuracy by length, all tasks together."""
        return self._grouped(lambda s: (s.length_tokens,))

    def by_depth(self, bins: int = 5, *, task: str | None = None) -> dict[tuple[int, int], tuple[float, int]]:
        """Share of right values, and how many were asked, by length and depth.

        Keys are `(length, bin)`, bin 0 the beginning of the context; each value counts where it truly stood.
        """
        found: dict[tuple[int, int], list[bool]] = {}
        for score in self.scores:
            if task in (None, score.task):
                for value in score.values:
                    where = (score.length_tokens, min(int(value.depth * bins), bins - 1))
                    found.setdefault(where, []).append(value.outcome == "right")
        return {where: (fmean(hits), len(hits)) for where, hits in sorted(found.items())}

    def failures(self) -> list[tuple[SampleScore, ValueScore]]:
        """Every value that was not right, with its sample, shortest texts first."""
        missed = [(s, v) for s in self.scores for v in s.values if v.outcome != "right"]
        return sorted(missed, key=lambda pair: (pair[0].length_tokens, pair[1].depth))

    def plot(self, path: str | Path | None = None, *, task: str | None = None, bins: int = 5) -> Figure:
        """Draw recall by depth and length as a heatmap; see `routeguard.recall.plot.draw_recall`."""
        from routeguard.recall.plot import draw_recall

        return draw_recall(self, path, task=task, bins=bins)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: settings, cells for reading, and every sample."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "recall",
            "settings": self.settings,
            "notes": list(self.notes),
            "cells": [
                {
                    "task": cell.label[0],
                    "length_tokens": cell.label[1],
                    **{name: value for name, value in vars(cell).items() if name != "label"},
                }
                for cell in self.cells()
            ],
            "scores": [score.to_dict() for score in self.scores],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RecallResult:
        """Raises ValueError for another schema version, or data that is no recall result."""
        if not isinstance(data, dict) or data.get("kind") != "recall":
            raise ValueError("this is not a recall result (no kind 'recall' in it)")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"recall result of schema version {data.get('schema_version')}; this version reads {SCHEMA_VERSION}"
            )
        try:
            scores = tuple(SampleScore.from_dict(score) for score in data["scores"])
            return cls(scores, dict(data["settings"]), tuple(data["notes"]))
        except KeyError as error:
            raise ValueError(f"the recall result lacks {error}") from None
        except TypeError as error:
            raise ValueError(f"the recall result is malformed: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write JSON, atomically."""
        from routeguard.storage.durable import write_json

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_json(target, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> RecallResult:
        """Read what `save` wrote; a folder means its `recall.json`. Raises ValueError if there is none, or damaged."""
        source = Path(path)
        source = source / "recall.json" if source.is_dir() else source
        if not source.is_file():
            raise ValueError(f"{source} is not a file; `routeguard recall MODEL --output FOLDER` writes recall.json")
        try:
            return cls.from_dict(json.loads(source.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} is damaged: {error}") from None
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def __str__(self) -> str:
        cells = {cell.label: cell for cell in self.cells()}
        rows = [["recall", *(f"@{length}" for length in self.lengths)]]
        for task in self.tasks:
            rows.append([task, *(_short(cells.get((task, length))) for length in self.lengths)])
        if len(self.tasks) > 1:
            together = {cell.label: cell for cell in self.by_length()}
            rows.append(["all tasks", *(_short(together[(length,)]) for length in self.lengths)])
        values = [value for score in self.scores for value in score.values]
        missed = [value for value in values if value.outcome != "right"]
        lines = [_aligned(rows), f"{len(self.scores)} samples; in brackets the 95 % interval"]
        if missed:
            close, other = (sum(v.outcome == kind for v in missed) for kind in ("close", "other"))
            lines.append(
                f"{len(missed)} of {len(values)} values missed: {close} off by a character or two, {other} answered "
                f"with another value of the text, {len(missed) - close - other} wrong"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    _repr_pretty_ = as_printed

    def _grouped(self, label: Callable[[SampleScore], tuple[str | int, ...]]) -> list[Cell]:
        groups: dict[tuple[str | int, ...], list[SampleScore]] = {}
        for score in self.scores:
            groups.setdefault(label(score), []).append(score)
        order = {task: i for i, task in enumerate(self.tasks)}
        keys = sorted(groups, key=lambda key: [order[part] if isinstance(part, str) else part for part in key])
        return [_cell(key, groups[key]) for key in keys]


def _cell(label: tuple[str | int, ...], scores: Sequence[SampleScore]) -> Cell:
    accuracy = fmean(score.score for score in scores)
    low, high = wilson(accuracy, len(scores))
    values = [value for score in scores for value in score.values]
    return Cell(
        label=label,
        count=len(scores),
        accuracy=accuracy,
        low=low,
        high=high,
        close=fmean(value.outcome == "close" for value in values),
        other=fmean(value.outcome == "other" for value in values),
        token_accuracy=_mean(score.token_accuracy for score in scores),
        nll=_mean(score.nll for score in scores),
    )


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return fmean(known) if known else None


def _short(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.accuracy:.2f} [{cell.low:.2f}–{cell.high:.2f}]"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )
