"""Compare rows with their start before anything is written: drift, what will change, hashes, and NaN. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from routeguard.checkpoint.compare import chunk_pairs, elements_of_pairs, num_unequal
from routeguard.checkpoint.row_plan import Progress, RowRestore, no_progress, prefetch
from routeguard.restoration.report import LayerRestore, refuse_not_finite
from routeguard.storage.floats import Floats, float_type, to_bytes, to_floats


@dataclass(frozen=True)
class Finding:
    """What comparing one `RowRestore` showed, before anything was written.

    Attributes:
        num_changed: entries whose bytes differ from what QK-Restore writes.
        moved, size: ‖W − W₀‖² and ‖W₀‖².
        sha256: of the start's values in the tuned dtype.
    """

    num_changed: int
    moved: float
    size: float
    sha256: str


def examine(rows: Sequence[RowRestore], progress: Progress = no_progress) -> list[Finding]:
    """Compare every row with its start, a part at a time. Raises ValueError for NaN or infinite weights in either."""
    findings, bad = [], []
    done, total = 0, sum(row.tuned.num_bytes for row in rows)
    with ThreadPoolExecutor(3) as workers:  # reading, hashing and arithmetic leave the interpreter's lock
        workers.submit(prefetch, rows)
        for row, (finding, fault) in zip(rows, workers.map(_examine, rows), strict=True):
            progress("comparing", done, total)
            done += row.tuned.num_bytes
            findings.append(finding)
            if fault:
                bad.append(f"{row.route.parameter} in {fault}")
    refuse_not_finite(bad)
    return findings


def per_layer(rows: Sequence[RowRestore], findings: Sequence[Finding]) -> tuple[LayerRestore, ...]:
    """The findings, layer by layer, as the report has them."""
    layers: dict[int, list[tuple[RowRestore, Finding]]] = {}
    for row, finding in zip(rows, findings, strict=True):
        layers.setdefault(row.route.layer, []).append((row, finding))
    return tuple(
        LayerRestore(
            layer=layer,
            tensors=tuple(dict.fromkeys(row.route.parameter for row, _ in members)),
            num_rows=sum(row.route.num_rows for row, _ in members),
            drift_before=drift_by_role(members),
            changed_bytes=sum(finding.num_changed * row.tuned.tensor.item_bytes for row, finding in members),
        )
        for layer, members in sorted(layers.items())
    )


def drift_by_role(members: Iterable[tuple[RowRestore, Finding]]) -> dict[str, float]:
    """‖W − W₀‖ / ‖W₀‖ over the weights of each role; roles that started at zero are left out."""
    sums: dict[str, list[float]] = {}
    for row, finding in members:
        if row.route.kind == "weight":
            total = sums.setdefault(row.route.role, [0.0, 0.0])
            total[0] += finding.moved
            total[1] += finding.size
    return {role: (moved / size) ** 0.5 for role, (moved, size) in sums.items() if size > 0}


def _examine(row: RowRestore) -> tuple[Finding, str]:
    start_type, tuned_type = row.start.tensor.dtype, row.tuned.tensor.dtype
    changed, moved, size = 0, 0.0, 0.0
    digest = hashlib.sha256()
    fault = ""
    most = elements_of_pairs(row.start, row.tuned)
    rooms: list[Floats] = [np.empty(most, float_type(kind)) for kind in (start_type, tuned_type)]
    for before, now in chunk_pairs(row.start, row.tuned):
        start = to_floats(before, start_type, rooms[0])
        written = before if start_type == tuned_type else to_bytes(start, tuned_type)
        digest.update(written)
        squares = _square(start)
        size += squares
        fault = fault or ("" if _finite(start, squares) else "BASE")
        num_changed = num_unequal(written, now, row.tuned.tensor.item_bytes)
        if not num_changed and start_type == tuned_type:
            continue
        changed += num_changed
        tuned = to_floats(now, tuned_type, rooms[1])
        with np.errstate(invalid="ignore", over="ignore"):
            difference = tuned - start
        squares = _square(difference)
        moved += squares
        fault = fault or ("" if _finite(difference, squares) or _finite(tuned, _square(tuned)) else "TUNED")
        if start_type != tuned_type and not np.isfinite(to_floats(written, tuned_type)).all():
            fault = fault or f"BASE, converted to {tuned_type}"
    return Finding(changed, moved, size, digest.hexdigest()), fault


def _square(values: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))


def _finite(values: Floats, squares: float) -> bool:
    """A NaN or an infinity makes the sum of squares not finite; so may an overflow, which gets a closer look."""
    return bool(np.isfinite(squares) or np.isfinite(values).all())
