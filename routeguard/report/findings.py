"""What does not fit together in the files of a run, and what failed in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from routeguard.recall.probe_failures import Failures
from routeguard.recall.result import RecallResult
from routeguard.restoration.average_report import AverageReport
from routeguard.restoration.report import RestoreReport
from routeguard.training.run_state import RunState

if TYPE_CHECKING:
    from routeguard.diagnostics.drift_report import DriftReport

_TOLERANCE = 0.01  # relative; the record and the restore measure the same weights


def find_warnings(
    kept: Path,
    state: RunState | None,
    drift: DriftReport | None,
    restore: RestoreReport | AverageReport | None,
    probed: Mapping[int, RecallResult],
    failures: Failures,
) -> tuple[str, ...]:
    """Sentences about failed measurements, drift where there can be none, and files that may be of different runs."""
    found = [f"Recall: {failures}."] if failures.found else []
    if state is not None and state.restore is not None and restore is None:
        found.append(
            "The run was asked to restore queries and keys at its end, and no report says that it did: it has not come "
            "to its end, or was stopped."
        )
    if drift is not None:
        last = drift.samples[-1]
        if not all(math.isfinite(value) for sample in drift.samples for value in sample.factors.values()):
            found.append("The drift record has entries that are no numbers: weights became NaN or infinite.")
        if state is not None and state.protect.get("mode") == "freeze" and any(last.factors.values()):
            found.append("Queries and keys were frozen, and yet the record says that they drifted.")
        if probed and max(probed) > last.step:
            found.append(
                f"Recall was measured up to step {max(probed)}, drift recorded up to step {last.step}: the two may be "
                "of different runs in one folder."
            )
        if isinstance(restore, RestoreReport) and _differ(drift, restore):
            found.append(
                "The drift that the restore found is not that of the last recorded step: the best checkpoint was "
                "loaded at the end, or the report of the restore is of an earlier run in this folder."
            )
    earlier = sorted(path.name for pattern in ("drift.*.jsonl", "recall.*.jsonl") for path in kept.glob(pattern))
    if earlier:
        found.append(f"Earlier runs in this folder were moved aside and are not shown: {', '.join(earlier)}.")
    return tuple(found)


def _differ(drift: DriftReport, restore: RestoreReport) -> bool:
    recorded = drift.samples[-1].factors
    return any(
        not math.isclose(value, recorded[layer.layer, role], rel_tol=_TOLERANCE, abs_tol=1e-6)
        for layer in restore.layers
        for role, value in layer.drift_before.items()
        if (layer.layer, role) in recorded
    )
