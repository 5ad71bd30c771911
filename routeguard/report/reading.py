"""Read each file of a run on its own: a part that is absent is None, one that is damaged is told and left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from routeguard.recall.probe_failures import Failure, Failures
from routeguard.recall.probe_record import read_recall
from routeguard.recall.result import RecallResult
from routeguard.report.run import Training
from routeguard.restoration.average_report import AverageReport
from routeguard.restoration.report import SCHEMA_VERSION, LayerRestore, RestoreReport

if TYPE_CHECKING:
    from routeguard.diagnostics.drift_report import DriftReport

T = TypeVar("T")


class Problems:
    """Files that could not be read, a sentence each."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def read(self, path: Path, reader: Callable[[Path], T]) -> T | None:
        """What `reader` makes of a file; None where there is no file, or, noted, where it cannot be read."""
        if not path.exists():
            return None
        try:
            return reader(path)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            text = str(error) if str(path) in str(error) else f"{path}: {type(error).__name__}: {error}"
            self.found.append(f"not read: {text}")
            return None


def read_drift_report(path: Path) -> DriftReport | None:
    """The drift record; None while it holds no step."""
    from routeguard.diagnostics.drift_report import drift_report

    lines = path.read_text(encoding="utf-8").splitlines()
    return drift_report(path) if len(lines) > 1 else None


def read_restore(path: Path) -> RestoreReport | AverageReport:
    """The report of a restore or an average. Raises ValueError or KeyError for another schema or a damaged file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema version {data.get('schema_version')}, this reads {SCHEMA_VERSION}")
    if "alpha" in data:
        return AverageReport(
            **{**{k: v for k, v in data.items() if k != "schema_version"}, "notes": tuple(data["notes"])}
        )
    layers = tuple(LayerRestore(**{**layer, "tensors": tuple(layer["tensors"])}) for layer in data["layers"])
    return RestoreReport(data["method"], data["origin"], layers, tuple(data["notes"]))


@dataclass(frozen=True)
class ProbeRecord:
    """What a probe measured by step, in the run and after a restore at its end, and what failed."""

    probed: Mapping[int, RecallResult]
    restored: Mapping[int, RecallResult]
    failures: Failures


def read_probe(path: Path) -> ProbeRecord:
    """A probe's record, with its failures. Raises ValueError or KeyError where it is damaged."""
    return ProbeRecord(read_recall(path), read_recall(path, restored=True), _failures(path))


def _failures(path: Path) -> Failures:
    failures = Failures()
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half-written end of a killed run
        if "failed" in data:
            failures.found.append(Failure(int(data["step"]), str(data["failed"]), bool(data["restored"])))
            failures.num_in_a_row += 1
        else:
            failures.succeeded()
    return failures


def read_training(path: Path) -> Training:
    """Steps, epochs and losses of a `trainer_state.json`."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    losses = [line["loss"] for line in data.get("log_history", []) if "loss" in line]
    return Training(
        source=f"{path.parent.name}/{path.name}",
        step=int(data["global_step"]),
        max_steps=data.get("max_steps"),
        epoch=data.get("epoch"),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
    )
