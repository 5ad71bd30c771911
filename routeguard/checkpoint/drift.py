"""`checkpoint_drift`: how far the routing rows of two checkpoints lie apart, by layer, role and head. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routeguard.checkpoint.in_place import refuse_interrupted
from routeguard.checkpoint.row_plan import Progress, RowRestore, by_place_notes, no_progress, plan_rows, prefetch
from routeguard.checkpoint.same_meaning import compare_meaning
from routeguard.checkpoint.start import open_plain, open_start, read_routes
from routeguard.routes.collection import ROUTING_ROLES, Role, Route, Routes
from routeguard.routes.wording import as_printed, listed
from routeguard.storage.floats import Floats, float_type, to_floats
from routeguard.storage.folder import is_adapter_folder
from routeguard.storage.hub import local_folder
from routeguard.storage.row_bytes import CHUNK_BYTES, Slice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TensorDrift:
    """The rows of one role in one tensor.

    Attributes:
        layer, role, kind, tensor: which; the name is TUNED's.
        drift: ‖W − W₀‖ / ‖W₀‖ over the rows, 0 to infinity; None if the start is all zero.
        heads: the same for each head, in order; empty where rows are not grouped by heads (MLA's first factors, norms).
        num_changed_rows: rows with any entry that differs.
        num_rows: rows compared.
    """

    layer: int
    role: str
    kind: str
    tensor: str
    drift: float | None
    heads: tuple[float | None, ...]
    num_changed_rows: int
    num_rows: int


@dataclass(frozen=True)
class CheckpointDrift:
    """What `checkpoint_drift` measured. `str()` prints a table, `plot()` draws it, `to_dict()` is JSON-serialisable.

    Attributes:
        base, tuned: what was compared.
        tensors: one entry for each role and tensor.
        routing: layer to the relative drift of each query head's logit form (`drift.routing_form`), if asked for;
            layers where weights do not make the logit are in `notes`.
        num_bytes_read: bytes of weights read, both sides together.
        notes: what was matched by place, what differs in meaning.
    """

    base: str
    tuned: str
    tensors: tuple[TensorDrift, ...]
    routing: dict[int, tuple[float, ...]] = field(default_factory=dict)
    num_bytes_read: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def plot(self) -> Figure:
        """One heat map for each role, layers by heads. Needs matplotlib (`pip install routeguard[plots]`)."""
        from routeguard.checkpoint.drift_plot import plot_drift

        return plot_drift(self)

    def __str__(self) -> str:
        roles = listed(dict.fromkeys(entry.role for entry in self.tensors))
        lines = [
            f"{self.tuned} against {self.base}: relative drift of {roles} rows",
            f"{'layer':>5}  {'role':<6} {'kind':<6}  {'drift':>9}  {'heads: lowest to highest':<26}  tensor",
        ]
        for entry in self.tensors:
            heads = [value for value in entry.heads if value is not None]
            spread = f"{min(heads):.4f} to {max(heads):.4f} ({len(entry.heads)})" if heads else "-"
            drift = "-" if entry.drift is None else f"{entry.drift:.5f}"
            lines.append(f"{entry.layer:>5}  {entry.role:<6} {entry.kind:<6}  {drift:>9}  {spread:<26}  {entry.tensor}")
        for layer, values in self.routing.items():
            lines.append(f"layer {layer}: logit form moved by {min(values):.4f} to {max(values):.4f} a query head")
        if all(entry.num_changed_rows == 0 for entry in self.tensors):
            lines.append("nothing has moved: every row equals its start")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    _repr_pretty_ = as_printed


def checkpoint_drift(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    *,
    roles: Iterable[Role] = ROUTING_ROLES,
    layers: Iterable[int] | None = None,
    norms: bool = False,
    routing: bool = False,
    insist: bool = False,
    progress: Progress = no_progress,
) -> CheckpointDrift:
    """Measure how far the queries and keys of a saved checkpoint moved, reading their rows and nothing else.

    Args:
        base: the checkpoint that the tuning started from (a folder, or a model id of the Hub), or what a guarded run
            kept.
        tuned: a checkpoint folder: safetensors, one file or sharded.
        roles: "query", "key", "value", "output". Default: query and key.
        layers: only these decoder layers. Default: every full-attention layer.
        norms: also the gains of query and key norms. Default: no.
        routing: also the drift of each head's logit form, rotary-aware (`drift.routing_form`), with torch. Default: no.
        insist: go on although the two differ in what gives the weights their meaning. Default: no.
        progress: called with "reading", the bytes read and their total. Default: nothing.

    Raises:
        ValueError: not checkpoints, not of the same model, quantised, or an adapter (merge it first).
    """
    tuned_folder, base_folder = Path(tuned), local_folder(str(base))
    if not tuned_folder.is_dir():
        raise ValueError(f"{tuned_folder} is not a folder with a checkpoint")
    if is_adapter_folder(tuned_folder):
        loaded = f"AutoPeftModelForCausalLM.from_pretrained('{tuned_folder}')"
        raise ValueError(
            f"{tuned_folder} is an adapter folder: the drift on disk is that of whole weights. Merge it first (with "
            f"peft: {loaded}.merge_and_unload().save_pretrained('MERGED')), or read the run's own drift.jsonl"
        )
    config, stored = open_plain(tuned_folder)
    refuse_interrupted(tuned_folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        routes = read_routes(tuned_folder, config, stored, roles=roles, norms=norms, layers=layers)
    start = open_start(base_folder)
    whole = read_routes(tuned_folder, config, stored)
    notes = [*start.notes, *compare_meaning(tuned_folder, config, whole, start, insist=insist)]
    rows = plan_rows(stored, routes, start)
    total = sum(row.tuned.num_bytes + row.start.num_bytes for row in rows)
    tensors: list[TensorDrift] = []
    read = 0
    with ThreadPoolExecutor(3) as workers:
        workers.submit(prefetch, rows)
        for row, measured in zip(rows, workers.map(partial(_tensor_drift, routes=routes), rows), strict=True):
            progress("reading", read, total)
            tensors.append(measured)
            read += row.tuned.num_bytes + row.start.num_bytes
    found: dict[int, tuple[float, ...]] = {}
    if routing:
        from routeguard.checkpoint.routing_form import routing_forms

        found, reasons = routing_forms(rows, routes)
        notes += reasons
    return CheckpointDrift(
        start.origin, str(tuned_folder), tuple(tensors), found, read,
        (*notes, *by_place_notes(rows)),
    )  # fmt: skip


def _tensor_drift(row: RowRestore, routes: Routes) -> TensorDrift:
    moved, size = np.zeros(row.route.num_rows), np.zeros(row.route.num_rows)
    changed = np.zeros(row.route.num_rows, dtype=bool)
    for at, start, tuned in _row_blocks(row):
        with np.errstate(invalid="ignore", over="ignore"):
            size[at] += np.vecdot(start, start)
            difference = tuned - start
            squares = np.vecdot(difference, difference)
            moved[at] += squares
            changed[at] |= squares > 0
            if not squares.all():  # nothing moved, or less than a square can show
                changed[at] |= difference.any(axis=1)
    if not np.isfinite(moved.sum() + size.sum()):
        raise ValueError(
            f"{row.route.parameter} holds NaN or infinite weights, here or in its start: no drift to measure"
        )
    heads = _num_heads(row.route, routes)
    return TensorDrift(
        layer=row.route.layer,
        role=row.route.role,
        kind=row.route.kind,
        tensor=row.route.parameter,
        drift=_relative(moved.sum(), size.sum()),
        heads=tuple(
            _relative(a, b)
            for a, b in zip(moved.reshape(heads, -1).sum(1), size.reshape(heads, -1).sum(1), strict=True)
        )
        if heads
        else (),
        num_changed_rows=int(np.count_nonzero(changed)),
        num_rows=row.route.num_rows,
    )


def _row_blocks(row: RowRestore) -> Iterator[tuple[slice, Floats, Floats]]:
    """(which of the route's rows, their start values, their tuned values), rows first, a part at a time.

    Both arrays are the caller's to write on, and overwritten by the next part.
    """
    shape, dim = row.route.shape, row.route.dim
    inner = prod(shape[dim + 1 :]) if dim == 0 else row.route.num_rows
    items = max(row.start.tensor.item_bytes, row.tuned.tensor.item_bytes)
    block = max(1, CHUNK_BYTES // (items * max(inner, 1))) * inner
    pairs = zip(_floats(row.start, block), _floats(row.tuned, block), strict=True)
    done = 0
    for start, tuned in pairs:
        start, tuned = start.reshape(-1, inner), tuned.reshape(-1, inner)
        if dim:  # a block of whole lines across the rows, which lie along the last dimension
            yield slice(0, inner), start.T, tuned.T
        else:
            yield slice(done, done + len(start)), start, tuned
            done += len(start)


def _floats(part: Slice, chunk_elements: int) -> Iterator[Floats]:
    buffer = bytearray(chunk_elements * part.tensor.item_bytes)
    room: Floats = np.empty(chunk_elements, float_type(part.tensor.dtype))
    for chunk in part.read_through(buffer):
        yield to_floats(chunk, part.tensor.dtype, room)


def _num_heads(route: Route, routes: Routes) -> int:
    """How many heads the rows are, 0 where they are not grouped by heads."""
    geometry = routes.geometry_of(route)
    heads = {"query": geometry.num_heads, "key": geometry.num_key_value_heads}.get(route.role, 0)
    return heads if heads and route.kind != "norm" and route.num_rows == heads * geometry.head_dim else 0


def _relative(moved: float, size: float) -> float | None:
    return float((moved / size) ** 0.5) if size > 0 else None
