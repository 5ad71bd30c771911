"""What a stage measured, the table over all stages, and what may be concluded from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .needles import Cell

HARD_KINDS = ("multikey", "dense")
MIN_STEPS = 300


@dataclass(frozen=True)
class Stage:
    """Held-out reasoning loss (nats a token) and recall of one set of weights."""

    name: str
    cot_loss: float
    cells: tuple[Cell, ...]
    seconds: float

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stage:
        cells = [{key: tuple(x) if isinstance(x, list) else x for key, x in cell.items()} for cell in data["cells"]]
        return cls(**{**data, "cells": tuple(Cell(**cell) for cell in cells)})


class Results:
    """The JSON file of a run: settings, stages and facts about each training run, written after every change.

    A file made with the same settings is continued, so an interrupted run picks up where it stopped; one made with
    other settings raises ValueError.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"settings": settings, "stages": {}, "runs": {}}
        if path.is_file():
            found = json.loads(path.read_text())
            if found["settings"] != json.loads(json.dumps(settings)):
                raise ValueError(
                    f"{path} holds results of other settings, {found['settings']}; now they are {settings}: "
                    "choose another --output, or delete the file"
                )
            self.data = found
            print(f"continuing {path}: {', '.join(found['stages']) or 'nothing'} already measured")

    def stage(self, name: str) -> Stage | None:
        """Return a stage that has been measured already, or None."""
        data = self.data["stages"].get(name)
        return None if data is None else Stage.from_json(data)

    def add_stage(self, stage: Stage) -> None:
        """Store a stage and write the file."""
        self.data["stages"][stage.name] = asdict(stage)
        self._write()

    def add_run(self, name: str, facts: dict[str, Any]) -> None:
        """Store facts about one training run and write the file."""
        self.data["runs"].setdefault(name, {}).update(facts)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1))


def stage_table(stages: list[Stage]) -> str:
    """Return two Markdown tables: share of whole values right, and nats a token of the asked values."""
    columns = [(cell.kind, cell.length_tokens) for cell in stages[0].cells]
    head = "| stage | CoT loss | " + " | ".join(f"{kind} @{length}" for kind, length in columns) + " |"
    rule = "|---" * (len(columns) + 2) + "|"
    parts = []
    for title, field, digits in (("values right", "value_accuracy", 2), ("nats a token", "value_nll", 3)):
        rows = [
            f"| {stage.name} | {stage.cot_loss:.3f} | "
            + " | ".join(f"{getattr(cell, field):.{digits}f}" for cell in stage.cells)
            + " |"
            for stage in stages
        ]
        parts.append("\n".join([f"needles, {title}:", "", head, rule, *rows]))
    return "\n\n".join(parts)


def paired_change(before: Stage, after: Stage, field: str) -> tuple[float, float]:
    """Return mean and standard error of after − before in one figure, over the haystacks of the harder kinds."""
    differences = [
        new - old
        for cell_before, cell_after in zip(before.cells, after.cells, strict=True)
        if cell_before.kind in HARD_KINDS
        for old, new in zip(getattr(cell_before, field), getattr(cell_after, field), strict=True)
    ]
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return fmean(differences), error


def conclusion(before: Stage, after: Stage, *, steps: int) -> str:
    """Say in a few words what one set of weights shows; about recall only when the reasoning was learned."""
    loss = f"{after.name}: held-out CoT loss {before.cot_loss:.3f} -> {after.cot_loss:.3f}"
    if after.cot_loss >= before.cot_loss:
        return f"{loss}: not learned, so nothing is concluded about recall."
    if steps < MIN_STEPS:
        return f"{loss}: learned, but {steps} steps are a smoke run: nothing is concluded about recall."
    return f"{loss}: learned. {recall_change(before, after)}"


def recall_change(before: Stage, after: Stage) -> str:
    """Say how recall of the harder needles changed, with its standard error."""
    share, share_error = paired_change(before, after, "haystack_accuracy")
    nats, nats_error = paired_change(before, after, "haystack_nll")
    sure = abs(share) > 2 * share_error
    verdict = ("recall rose" if share > 0 else "recall fell") if sure else "no change of recall beyond the noise"
    return (
        f"From {before.name} to {after.name}, harder needles: values right {share:+.3f} ± {share_error:.3f}, "
        f"nats a token {nats:+.3f} ± {nats_error:.3f} (paired, ± one standard error over haystacks): {verdict}."
    )
