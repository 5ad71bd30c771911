"""Do all runs of several experiments that are still missing, in one process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.lab.experiment import journal
from benchmarks.lab.experiment.plan import Experiment, Run
from benchmarks.lab.experiment.runs import do_run

Progress = Callable[[str], None]


def do_all(work: Sequence[tuple[Experiment, Run]], *, workers: int, say: Progress) -> None:
    """Do the runs in order; whatever is done stays done when the process is killed.

    Args:
        work: runs with their experiments.
        workers: processes at a time, each with one thread.
        say: called with a line for each run that is done.
    """
    if workers == 1:
        for i, (experiment, run) in enumerate(work):
            say(_line(i, len(work), experiment, run, _results(experiment, run)))
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_results, experiment, run): (experiment, run) for experiment, run in work}
        for i, future in enumerate(as_completed(futures)):
            say(_line(i, len(work), *futures[future], future.result()))


def _results(experiment: Experiment, run: Run) -> list[journal.Result]:
    return list(do_run(experiment, run))


def _line(index: int, total: int, experiment: Experiment, run: Run, results: Sequence[journal.Result]) -> str:
    seconds = sum(result["score_seconds"] for result in results) + results[0]["run"].get("seconds", 0)
    name = f"{experiment.subject.architecture.name} {experiment.data.name}"
    return f"{index + 1}/{total}  {name}, {run}: {seconds:.0f} s"
