"""What a restore on disk is about to do: which rows come from where, whether they may, and how far they had moved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from routeguard.checkpoint.compare import Slice, chunk_pairs, num_unequal
from routeguard.checkpoint.start import Start, with_places
from routeguard.restoration.report import LayerRestore
from routeguard.routes.collection import Route, Routes
from routeguard.routes.names import canonical_name
from routeguard.storage.floats import FLOATS, Floats, converted, is_exact, to_bytes, to_floats
from routeguard.storage.header import StoredTensor

# Called with a stage ("comparing", "computing", "copying"), what is done and the total.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class RowRestore:
    """The rows of one route in the tuned checkpoint, and their start."""

    route: Route
    tuned: Slice
    start: Slice

    def start_chunks(self) -> Iterator[bytes]:
        """The start's values in the tuned dtype: the very bytes where the dtypes are equal."""
        for chunk in self.start.chunks():
            yield converted(chunk, self.start.tensor.dtype, self.tuned.tensor.dtype)


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


def plan_rows(stored: Mapping[str, StoredTensor], routes: Routes, start: Start) -> list[RowRestore]:
    """Find the start of every route. Raises ValueError, listing them, for routes whose start is absent or unusable."""
    rows, missing = [], []
    for route, place in with_places(routes):
        tensor = stored[canonical_name(route.parameter)]
        found = start.find(route, place)
        if found is None or found.num_elements != route.num_parameters:
            missing.append(f"layer {route.layer} {route.role} {route.kind}: {route.parameter} {list(route.shape)}")
            continue
        for part, whose in ((Slice(tensor, route.rows, route.dim), "TUNED"), (found, "BASE")):
            if part.tensor.dtype not in FLOATS:
                raise ValueError(
                    f"{part.tensor.name} of {whose} is stored as {part.tensor.dtype}: a quantised weight, whose rows "
                    "mean nothing without its scales. Dequantise it (load the model, call dequantize(), save it) first"
                )
        rows.append(RowRestore(route, Slice(tensor, route.rows, route.dim), found))
    if missing:
        shown = "\n  ".join(missing[:8])
        more = f"\n  … and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(
            f"{start.origin} is not what this checkpoint was tuned from: it lacks {len(missing)} of {len(routes)} "
            f"routes, or has them in another shape:\n  {shown}{more}\nGive the checkpoint that the tuning started from"
        )
    if not rows:
        raise ValueError("no route is left to restore; widen roles or layers")
    return rows


def examine(rows: Sequence[RowRestore], progress: Progress = no_progress) -> list[Finding]:
    """Compare every row with its start, 1 MiB at a time. Raises ValueError for NaN or infinite weights in either."""
    findings, bad = [], []
    done, total = 0, sum(row.tuned.num_bytes for row in rows)
    for row in rows:
        progress("comparing", done, total)
        done += row.tuned.num_bytes
        finding, fault = _examine(row)
        findings.append(finding)
        if fault:
            bad.append(f"{row.route.parameter} in {fault}")
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise ValueError(
            f"NaN or infinite routing weights: {', '.join(bad[:4])}{more}; a run that diverged cannot be repaired by "
            "its queries and keys, use an earlier checkpoint"
        )
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


def conversion_notes(rows: Sequence[RowRestore]) -> list[str]:
    """One line for each pair of dtypes that had to be converted."""
    pairs: dict[tuple[str, str], int] = {}
    for row in rows:
        pair = (row.start.tensor.dtype, row.tuned.tensor.dtype)
        if pair[0] != pair[1]:
            pairs[pair] = pairs.get(pair, 0) + 1
    return [
        f"{count} tensors converted from the start's {have} to {want} "
        f"({'exact' if is_exact(have, want) else 'rounded'})"
        for (have, want), count in pairs.items()
    ]


def by_place_notes(rows: Sequence[RowRestore]) -> list[str]:
    """Which tensors were matched by layer and role because their names differ."""
    renamed = [row for row in rows if canonical_name(row.start.tensor.name) != canonical_name(row.route.parameter)]
    if not renamed:
        return []
    first = renamed[0]
    return [
        f"{len(renamed)} tensors matched by layer and role, not by name (first: {first.route.parameter} from "
        f"{first.start.tensor.name})"
    ]


def _examine(row: RowRestore) -> tuple[Finding, str]:
    start_type, tuned_type = row.start.tensor.dtype, row.tuned.tensor.dtype
    changed, moved, size = 0, 0.0, 0.0
    digest = hashlib.sha256()
    fault = ""
    for before, now in chunk_pairs(row.start, row.tuned):
        start = to_floats(before, start_type)
        written = before if start_type == tuned_type else to_bytes(start, tuned_type)
        digest.update(written)
        squares = _square(start)
        size += squares
        fault = fault or ("" if _finite(start, squares) else "BASE")
        if written == now:
            if start_type != tuned_type:
                moved += _square(start - to_floats(now, tuned_type))
            continue
        tuned = to_floats(now, tuned_type)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = tuned - start
        squares = _square(difference)
        fault = fault or ("" if _finite(difference, squares) or _finite(tuned, _square(tuned)) else "TUNED")
        fault = fault or (
            "" if np.isfinite(to_floats(written, tuned_type)).all() else f"BASE, converted to {tuned_type}"
        )
        changed += num_unequal(written, now, row.tuned.tensor.item_bytes)
        moved += squares
    return Finding(changed, moved, size, digest.hexdigest()), fault


def _square(values: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))


def _finite(values: Floats, squares: float) -> bool:
    """A NaN or an infinity makes the sum of squares not finite; so may an overflow, which gets a closer look."""
    return bool(np.isfinite(squares) or np.isfinite(values).all())
