"""Results as a table to ask questions of: by architecture, data, purpose, condition and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.lab.conditions.table import BEFORE, CONDITIONS, QK
from benchmarks.lab.experiment.journal import Result
from benchmarks.lab.experiment.seeds import Purpose
from benchmarks.lab.language.needles import DEVELOPMENT, TESTED
from benchmarks.lab.models.architectures import ARCHITECTURES
from benchmarks.lab.report.statistics import Estimate, estimate
from benchmarks.lab.training.data import DATA_KINDS

EQUAL_REASONING = 0.02  # as much less, on average over seeds, counts as equal

Score = Callable[[Result], float]


@dataclass(frozen=True)
class Cell:
    """One architecture and data kind, under the seeds of one purpose.

    Attributes:
        architecture, data, purpose: their names.
        model_seed: of the pretrained model.
        results: by condition and seed.
    """

    architecture: str
    data: str
    purpose: Purpose
    model_seed: int
    results: dict[str, dict[int, Result]]

    @property
    def title(self) -> str:
        """As in headings."""
        model = f", pretrained model {self.model_seed}" if self.model_seed else ""
        return f"{ARCHITECTURES[self.architecture].title}, {DATA_KINDS[self.data].title}{model}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths of recall, shortest first."""
        return tuple(self._any["settings"]["lengths"])

    @property
    def kind(self) -> str:
        """The needle kind that counts: the tested one in the confirmation, the development kind before it."""
        return TESTED.name if self.purpose == "confirmation" else DEVELOPMENT.name

    @property
    def conditions(self) -> list[str]:
        """Conditions with results, in the order of the table of conditions, the pretrained model first."""
        known = [BEFORE, *CONDITIONS]
        return sorted(self.results, key=lambda name: known.index(name) if name in known else len(known))

    @property
    def _any(self) -> Result:
        return next(iter(next(iter(self.results.values())).values()))

    def recall_at(self, length: int, kind: str | None = None) -> Score:
        """Recall of a needle kind at a length; by default of the kind that counts."""
        return lambda result: result["recall"][kind or self.kind][str(length)]

    @property
    def recall(self) -> Score:
        """Recall at the longest length."""
        return self.recall_at(self.lengths[-1])

    def estimate(self, condition: str, score: Score) -> Estimate:
        """Mean of a score over seeds."""
        return estimate([score(result) for result in self.results[condition].values()])

    def difference(self, condition: str, other: str, score: Score) -> Estimate | None:
        """Mean of the difference to another condition, paired over the seeds that both have; None without any."""
        ours, theirs = self.results.get(condition, {}), self.results.get(other, {})
        both = sorted(ours.keys() & theirs.keys())
        return estimate([score(ours[seed]) - score(theirs[seed]) for seed in both]) if both else None

    def keeps_reasoning(self, condition: str, other: str = QK) -> bool:
        """Whether what fine-tuning taught is at least as good as in another condition (`EQUAL_REASONING`)."""
        lost = self.difference(condition, other, new_results)
        return lost is not None and lost.mean >= -EQUAL_REASONING


def new_results(result: Result) -> float:
    """Reasoning as tables have it: right results in the cells that only fine-tuning taught."""
    return float(result["reasoning"]["new"])


def cells(results: Iterable[Result]) -> list[Cell]:
    """All results by architecture, data, model and purpose, in the order of the architectures."""
    found: dict[tuple[str, str, int, Purpose], dict[str, dict[int, Result]]] = {}
    for result in results:
        key = (result["architecture"], result["data"], result["model_seed"], result["purpose"])
        found.setdefault(key, {}).setdefault(result["condition"], {})[result["seed"]] = result
    return [
        Cell(architecture, data, purpose, model_seed, found[architecture, data, model_seed, purpose])
        for architecture, data, model_seed, purpose in sorted(found, key=_place)
    ]


def _place(key: tuple[str, str, int, Purpose]) -> tuple[int, int, int, bool]:
    architecture, data, model_seed, purpose = key
    return (list(ARCHITECTURES).index(architecture), model_seed, list(DATA_KINDS).index(data), purpose == "development")
