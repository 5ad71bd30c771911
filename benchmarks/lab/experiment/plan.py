"""An experiment: one pretrained model, one kind of data, and the runs that are still to be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.conditions.table import BEFORE, Condition, by_run
from benchmarks.lab.experiment import journal
from benchmarks.lab.experiment.subject import Subject
from benchmarks.lab.training.data import DataKind
from benchmarks.lab.training.plan import Training

NUM_SAMPLES = 32
NUM_CHAINS = 96


@dataclass(frozen=True)
class Experiment:
    """What all runs of an experiment share.

    Attributes:
        subject: the pretrained model.
        data: what it is fine-tuned on.
        steps: optimizer steps of a run, unless its condition scales them.
        num_samples: texts a recall score, six needles each.
        num_chains: texts a reasoning score.
        results: folder of the results.
    """

    subject: Subject
    data: DataKind
    steps: int
    num_samples: int = NUM_SAMPLES
    num_chains: int = NUM_CHAINS
    results: Path = journal.RESULTS

    @property
    def path(self) -> Path:
        """Where its results are."""
        return journal.path_for(self.subject.architecture.name, self.data.name, self.results)

    def identity(self, condition: str, seed: int) -> dict[str, Any]:
        """The keys that tell results apart."""
        return {
            "architecture": self.subject.architecture.name,
            "model_seed": self.subject.model_seed,
            "data": self.data.name,
            "seed": seed,
            "condition": condition,
        }

    def settings(self, condition: Condition | None) -> dict[str, Any]:
        """What a result depends on besides: another value means another experiment."""
        return {
            **({"training": None, "repair": {}} if condition is None else condition.settings()),
            "steps": self.steps,
            "learning_rate": self.subject.architecture.fine_tune_rate,
            "num_samples": self.num_samples,
            "num_chains": self.num_chains,
            "lengths": list(self.subject.architecture.lengths),
        }


@dataclass(frozen=True)
class Run:
    """A run that is still to be done.

    Attributes:
        seed: of data and run.
        training: how to fine-tune; None scores the pretrained model.
        conditions: what is scored of it; empty for the pretrained model.
    """

    seed: int
    training: Training | None
    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        names = [condition.name for condition in self.conditions] or [BEFORE]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"seed {self.seed}, {names[0]}{more}"


def runs_to_do(experiment: Experiment, conditions: Sequence[Condition], seeds: Sequence[int]) -> list[Run]:
    """The runs that still have a result to give, seed by seed, the pretrained model first.

    Raises ValueError where a result is there under other settings.
    """
    wanted: list[dict[str, Any]] = []
    for seed in seeds:
        wanted.append({**experiment.identity(BEFORE, seed), "settings": experiment.settings(None)})
        wanted += [{**experiment.identity(c.name, seed), "settings": experiment.settings(c)} for c in conditions]
    left = {(result["seed"], result["condition"]) for result in journal.missing(experiment.path, wanted)}
    runs = []
    for seed in seeds:
        if (seed, BEFORE) in left:
            runs.append(Run(seed, None, ()))
        for training, members in by_run([c for c in conditions if (seed, c.name) in left]).items():
            runs.append(Run(seed, training, tuple(members)))
    return runs
