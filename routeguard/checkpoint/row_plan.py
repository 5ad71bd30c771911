"""Which rows of a checkpoint come from where in its start, and whether they may. Neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from routeguard.checkpoint.start import Start
from routeguard.routes.collection import Route, Routes
from routeguard.routes.names import canonical_name
from routeguard.routes.places import with_places
from routeguard.storage.header import FLOATS, StoredTensor
from routeguard.storage.row_bytes import Slice, prefetch_rows

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
        if self.start.tensor.dtype == self.tuned.tensor.dtype:
            yield from self.start.chunks()
            return
        from routeguard.storage.floats import converted

        for chunk in self.start.chunks():
            yield converted(chunk, self.start.tensor.dtype, self.tuned.tensor.dtype)


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
    _refuse_lost_biases(routes, start)
    if not rows:
        raise ValueError("no route is left to restore; widen roles or layers")
    return rows


def _refuse_lost_biases(routes: Routes, start: Start) -> None:
    """A start with biases on queries and keys is not restored by weights alone."""
    if start.is_sidecar:
        return
    chosen = {(route.layer, route.role) for route in routes if route.kind == "weight"}
    mine = {(route.layer, route.role) for route in routes if route.kind == "bias"}
    lost = [r for r in start.routes if r.kind == "bias" and (r.layer, r.role) in chosen - mine]
    if lost:
        raise ValueError(
            f"{start.origin} has biases that TUNED lacks (first: {lost[0].parameter}): its weights alone would not "
            "give the old queries and keys. They are not the same architecture"
        )


def prefetch(rows: Iterable[RowRestore]) -> None:
    """Have both sides of every row read ahead."""
    prefetch_rows(part for row in rows for part in (row.start, row.tuned))


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
