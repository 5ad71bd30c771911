"""What a restore on disk is going to write and say. Making it writes nothing, and imports no torch for QK-Restore."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import routeguard
from routeguard.checkpoint.patch import Patch
from routeguard.checkpoint.row_plan import Progress, RowRestore, by_place_notes, plan_rows
from routeguard.checkpoint.same_meaning import compare_meaning
from routeguard.checkpoint.start import open_plain, open_start, read_routes
from routeguard.protect.modes import Interpolate, QKPro, QKRestore, Restoration
from routeguard.restoration.report import RestoreReport, conversion_notes, describe_method
from routeguard.routes.collection import Role, Routes
from routeguard.routes.heads import Heads, select_heads
from routeguard.storage.folder import is_adapter_folder

if TYPE_CHECKING:
    from routeguard.checkpoint.examine import Finding

Report = TypeVar("Report")


@dataclass(frozen=True)
class Choice:
    """What to restore and how: the arguments of `restore_checkpoint` that say so."""

    method: Restoration
    roles: tuple[Role, ...]
    layers: Iterable[int] | None
    heads: Heads | None
    norms: bool
    insist: bool


@dataclass(frozen=True)
class Job(Generic[Report]):
    """Everything that a repair is about to write and say.

    Attributes:
        patches: the rows that change.
        report: for people.
        facts: for `provenance.json`.
    """

    patches: Sequence[Patch]
    report: Report
    facts: dict[str, Any]


def open_job(base: Path, tuned: Path, choice: Choice, progress: Progress) -> Callable[[], Job[RestoreReport]]:
    """Read configs and headers, and refuse what they tell; the function that is returned reads and compares the rows.

    Raises ValueError, now or in that function, for everything that `restore_checkpoint` refuses of its two folders.
    """
    if is_adapter_folder(tuned):
        return partial(_adapter_job, base, tuned, choice)
    config, stored = open_plain(tuned)
    with warnings.catch_warnings():  # a pure softmax model is worth a warning when it is guarded, not here
        warnings.simplefilter("ignore", UserWarning)
        routes = read_routes(tuned, config, stored, roles=choice.roles, norms=choice.norms, layers=choice.layers)
    if choice.heads is not None:
        routes = select_heads(routes, choice.heads)
    start = open_start(base)
    whole = read_routes(tuned, config, stored)  # whatever layers were chosen
    notes = [*start.notes, *compare_meaning(tuned, config, whole, start, insist=choice.insist)]
    rows = plan_rows(stored, routes, start)

    def compare() -> Job[RestoreReport]:
        from routeguard.checkpoint.examine import examine, per_layer  # with numpy, while a copy may already run

        findings = examine(rows, progress)
        patches, written, method_notes = _patches(rows, findings, routes, choice.method, progress)
        found = [
            *notes,
            *by_place_notes(rows),
            *conversion_notes((row.start.tensor.dtype, row.tuned.tensor.dtype) for row in rows),
            *method_notes,
        ]
        if not any(finding.num_changed for finding in written):
            found.append("nothing had moved: every row already equals what was written")
        method = describe_method(choice.method, routes)
        report = RestoreReport(method, start.origin, per_layer(rows, written), tuple(found))
        return Job(patches, report, facts_of(base, tuned, report.method, report.notes, _tensor_facts(rows, written)))

    return compare


def _adapter_job(base: Path, tuned: Path, choice: Choice) -> Job[RestoreReport]:
    from routeguard.checkpoint.adapter_rows import plan_adapter

    if choice.heads is not None:
        raise ValueError("heads= is for whole weights: merge the adapter (merge_and_unload), restore the merged model")
    start = open_start(base)
    patches, report, records = plan_adapter(tuned, start, choice.method, choice.roles, choice.layers, choice.norms)
    return Job(patches, report, facts_of(base, tuned, report.method, report.notes, records))


def _patches(
    rows: Sequence[RowRestore], findings: list[Finding], routes: Routes, mode: Restoration, progress: Progress
) -> tuple[list[Patch], list[Finding], tuple[str, ...]]:
    if isinstance(mode, (QKPro, Interpolate)):
        from routeguard.checkpoint.computed_rows import compute_rows

        return compute_rows(rows, findings, routes, mode, progress)
    assert isinstance(mode, QKRestore)
    return (
        [Patch(row.tuned.tensor, row.tuned.rows, row.tuned.dim, partial(_start_of, row)) for row in rows],
        findings,
        (),
    )


def _start_of(row: RowRestore) -> Iterable[bytes]:
    return row.start_chunks()


def _tensor_facts(rows: Sequence[RowRestore], findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "layer": row.route.layer,
            "role": row.route.role,
            "kind": row.route.kind,
            "tensor": row.tuned.tensor.name,
            "file": row.tuned.tensor.file.name,
            "rows": row.tuned.rows,
            "dim": row.tuned.dim,
            "dtype": row.tuned.tensor.dtype,
            "from_tensor": row.start.tensor.name,
            "from_dtype": row.start.tensor.dtype,
            "drift_before": (finding.moved / finding.size) ** 0.5 if finding.size else None,
            "changed_entries": finding.num_changed,
            "sha256": finding.sha256,
        }
        for row, finding in zip(rows, findings, strict=True)
    ]


def facts_of(
    base: Path, tuned: Path, method: str, notes: Sequence[str], tensors: list[dict[str, Any]]
) -> dict[str, Any]:
    """One entry of `provenance.json`."""
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "routeguard": routeguard.__version__,
        "method": method,
        "base": str(base),
        "tuned": str(tuned),
        "notes": list(notes),
        "tensors": tensors,
    }
