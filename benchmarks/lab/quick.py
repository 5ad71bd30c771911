"""The quick version: one architecture, one seed, the conditions that say most, from nothing in minutes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lab.models.weights import BUILD

FOLDER = BUILD / "quick"


def run(*, workers: int = 2, folder: Path = FOLDER) -> None:
    """Pretrain the main architecture if need be, do the quick conditions' runs, and write their report.

    Nothing of it goes into the evidence: results and report are in `folder`.
    """
    from benchmarks.lab import commands
    from benchmarks.lab.conditions.sets import QUICK
    from benchmarks.lab.experiment.seeds import DEVELOPMENT_SEEDS
    from benchmarks.lab.models.architectures import MAIN_ARCHITECTURE

    commands.pretrain([MAIN_ARCHITECTURE])
    commands.run(
        [MAIN_ARCHITECTURE],
        conditions=QUICK,
        seeds=DEVELOPMENT_SEEDS[:1],
        workers=workers,
        results=folder / "results",
    )
    commands.report(folder / "results", folder)
