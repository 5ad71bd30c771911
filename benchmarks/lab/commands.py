"""What the lab's commands do, callable from Python."""

from __future__ import annotations

import difflib
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from benchmarks.lab.conditions import sets
from benchmarks.lab.conditions.table import CONDITIONS, find_conditions
from benchmarks.lab.experiment import journal
from benchmarks.lab.experiment import seeds as seed_sets
from benchmarks.lab.experiment.loop import do_all
from benchmarks.lab.experiment.plan import Experiment, runs_to_do
from benchmarks.lab.experiment.subject import Subject
from benchmarks.lab.measuring.reach import REACH_FILE, reach_of
from benchmarks.lab.models.architectures import ARCHITECTURES, MAIN_ARCHITECTURE
from benchmarks.lab.models.weights import RECORD, folder_of, make
from benchmarks.lab.training.data import DATA_KINDS, MAIN_DATA

Named = TypeVar("Named")


def pretrain(architectures: Sequence[str] | None = None, *, model_seed: int = 0, workers: int = 1) -> None:
    """Make the pretrained models that are not there yet."""
    wanted = [a for a in _chosen(architectures, ARCHITECTURES) if not (folder_of(a, model_seed) / RECORD).is_file()]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for folder in pool.map(_make, [a.name for a in wanted], [model_seed] * len(wanted)):
            print(f"pretrained: {folder}", flush=True)


def _make(architecture: str, model_seed: int) -> Path:
    return make(ARCHITECTURES[architecture], seed=model_seed)


def run(
    architectures: Sequence[str] | None = None,
    *,
    data: Sequence[str] = (MAIN_DATA,),
    conditions: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    confirm: bool = False,
    model_seed: int = 0,
    workers: int = 1,
    results: Path | None = None,
) -> None:
    """Do every run that is missing in the results.

    Args:
        architectures, data: names; None is all of them.
        conditions: names; None is the set that `conditions.sets` has for the experiment.
        seeds: None is the development seeds, or with `confirm` those of the confirmation.
        confirm: the confirmation, with its conditions and seeds, unless others are named.
        model_seed: which pretrained models.
        workers: processes at a time.
        results: folder of the results.
    """
    work = []
    for architecture in _chosen(architectures, ARCHITECTURES):
        for kind in _chosen(data, DATA_KINDS):
            is_main = architecture.name == MAIN_ARCHITECTURE and kind.name == MAIN_DATA
            if is_main:
                ours = sets.CONFIRMED if confirm else sets.MAIN
            else:
                ours = sets.CONFIRMED_ELSEWHERE if confirm else sets.ELSEWHERE
            chosen = find_conditions(conditions or ours)
            experiment = Experiment(
                Subject(architecture, model_seed),
                kind,
                architecture.fine_tune_steps,
                results=results or journal.RESULTS,
            )
            usual = seed_sets.confirmation_seeds(is_main) if confirm else seed_sets.DEVELOPMENT_SEEDS
            work += [(experiment, todo) for todo in runs_to_do(experiment, chosen, seeds or usual)]
    print(f"{len(work)} runs to do", flush=True)
    do_all(work, workers=workers, say=lambda line: print(line, flush=True))


def report(results: Path | None = None, output: Path | None = None) -> None:
    """Write tables and plots from the results."""
    from benchmarks.lab.report.page import write_page

    print(f"written: {write_page(results or journal.RESULTS, output or journal.RESULTS.parent)}", flush=True)


def reach(architectures: Sequence[str] | None = None, *, model_seed: int = 0, results: Path | None = None) -> None:
    """Measure, before fine-tuning, how far back data and gradient reach; adds to `reach.jsonl` in the results."""
    path = (results or journal.RESULTS) / REACH_FILE
    there = {(line["architecture"], line["data"], line["model"]) for line in journal.read(path)}
    for architecture in _chosen(architectures, ARCHITECTURES):
        subject = Subject(architecture, model_seed)
        for kind in DATA_KINDS.values():
            if (architecture.name, kind.name, subject.digest) in there:
                continue
            found = reach_of(subject.model(), subject.tokenizer, kind)
            line = {"architecture": architecture.name, "data": kind.name, "model": subject.digest, **asdict(found)}
            journal.append(path, line)
            print(f"{architecture.name} {kind.name}: look-ups {found.look_ups}, gradient {found.gradient}", flush=True)


def list_conditions() -> None:
    """Print the conditions with their settings."""
    for condition in CONDITIONS.values():
        print(f"{condition.name:<40} {condition.settings()}")


def _chosen(names: Sequence[str] | None, known: Mapping[str, Named]) -> list[Named]:
    """Those of the names, or all. Raises ValueError for one that is not known."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(known)}{f'; closest {close[0]}' if close else ''}")
    return [known[name] for name in names or known]
