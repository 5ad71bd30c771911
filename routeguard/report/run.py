"""What is known about a guarded run: plain data, made by `collect_run`, read by the page and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeguard.recall.gate import GateReport
from routeguard.recall.probe_failures import Failures
from routeguard.recall.result import RecallResult
from routeguard.report.environment import Recorded
from routeguard.restoration.average_report import AverageReport
from routeguard.restoration.report import RestoreReport
from routeguard.training.coverage import Coverage
from routeguard.training.run_state import RunState

if TYPE_CHECKING:
    from routeguard.diagnostics.drift_report import DriftReport

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Training:
    """What `trainer_state.json` tells: the file, the step it was written at, and the first and last logged loss."""

    source: str
    step: int
    max_steps: int | None
    epoch: float | None
    first_loss: float | None
    last_loss: float | None


@dataclass(frozen=True)
class Verdict:
    """A gate between two measurements, or why there is none.

    Attributes:
        name: which two, for example "before and after".
        report: the verdict; None where the two cannot be compared.
        problem: why not.
    """

    name: str
    report: GateReport | None
    problem: str = ""


@dataclass(frozen=True)
class RunReport:
    """A guarded run.

    Attributes:
        folder: the run's output folder.
        state: settings of the guard; None where none were written.
        coverage: which tensors and rows were held; None where no file tells.
        drift: the drift record; None without a step.
        restore: what was put back at the end, or averaged; None if nothing was.
        probed: recall during the run by step.
        probed_restored: recall after a restore at the end, by step.
        failures: measurements during the run that failed.
        given: results of `routeguard recall` by state: "before", "after", "restored".
        verdicts: gates between them.
        reasoning: scores before and after, if given.
        training: what the Trainer wrote; None if it wrote nothing.
        environment: versions and the like, with where they are recorded.
        warnings: what a reader should know before trusting the rest.
        notes: remarks that the run's parts carry.
        absent: parts that are not here, a sentence each.
    """

    folder: Path
    state: RunState | None
    coverage: Coverage | None
    drift: DriftReport | None
    restore: RestoreReport | AverageReport | None
    probed: Mapping[int, RecallResult]
    probed_restored: Mapping[int, RecallResult]
    failures: Failures
    given: Mapping[str, RecallResult]
    verdicts: tuple[Verdict, ...]
    reasoning: tuple[float, float] | None
    training: Training | None
    environment: tuple[Recorded, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    absent: tuple[str, ...]
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def states_during(self) -> dict[str, RecallResult]:
        """Recall that the run measured itself, by state: at its first step, at its last, after its restore."""
        found = {}
        if self.probed:
            first, last = min(self.probed), max(self.probed)
            found[f"before (step {first})"] = self.probed[first]
            if last != first:
                found[f"after (step {last})"] = self.probed[last]
        for step, result in self.probed_restored.items():
            found[f"restored (step {step})"] = result
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data; recall as cells and shares by depth, without the single answers."""
        return {
            "schema_version": self.schema_version,
            "kind": "run_report",
            "folder": str(self.folder),
            "state": None if self.state is None else asdict(self.state),
            "coverage": None if self.coverage is None else asdict(self.coverage),
            "drift": None if self.drift is None else self.drift.to_dict(),
            "restore": None if self.restore is None else self.restore.to_dict(),
            "probed": {str(step): _recall(result) for step, result in self.probed.items()},
            "probed_restored": {str(step): _recall(result) for step, result in self.probed_restored.items()},
            "failures": [asdict(failure) for failure in self.failures.found],
            "given": {name: _recall(result) for name, result in self.given.items()},
            "verdicts": [
                {"name": v.name, "problem": v.problem, "gate": None if v.report is None else v.report.to_dict()}
                for v in self.verdicts
            ],
            "reasoning": None if self.reasoning is None else list(self.reasoning),
            "training": None if self.training is None else asdict(self.training),
            "environment": [asdict(recorded) for recorded in self.environment],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "absent": list(self.absent),
        }


def _recall(result: RecallResult) -> dict[str, Any]:
    data = result.to_dict()
    return {name: data[name] for name in ("settings", "notes", "cells")}
