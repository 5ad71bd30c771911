"""Interpolate and QK-Pro on disk: rows computed one layer at a time, by the code that models in memory use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from routeguard.checkpoint.compare import num_unequal
from routeguard.checkpoint.examine import Finding
from routeguard.checkpoint.patch import Patch
from routeguard.checkpoint.row_plan import Progress, RowRestore, no_progress
from routeguard.checkpoint.tensors import read_tensor, tensor_bytes
from routeguard.protect.held import Held
from routeguard.protect.modes import Interpolate, QKPro
from routeguard.protect.rows import put_rows, take_rows
from routeguard.restoration.methods import interpolated, qk_pro_values, refuse_other_roles
from routeguard.restoration.reference import Reference
from routeguard.restoration.report import WORTH_A_NOTE
from routeguard.routes.collection import Routes
from routeguard.routes.names import canonical_name
from routeguard.storage.row_bytes import Slice, read_rows

# Computes the new values of some rows of one layer; returns them and notes for the report.
_Compute = Callable[[Sequence[RowRestore]], tuple[list[Tensor], tuple[str, ...]]]


def compute_rows(
    rows: Sequence[RowRestore],
    findings: Sequence[Finding],
    routes: Routes,
    method: Interpolate | QKPro,
    progress: Progress = no_progress,
) -> tuple[list[Patch], list[Finding], tuple[str, ...]]:
    """Patches in the order of `rows`, findings about what they write, and notes.

    Everything is computed once here, so that what is refused is refused before a byte is written, and again, layer by
    layer, when the patches are written: memory holds one layer.

    Raises ValueError as QK-Pro does in memory: roles other than query and key, a layer where it is not defined.
    """
    compute: _Compute
    if isinstance(method, QKPro):
        refuse_other_roles(row.route for row in rows)
        compute = partial(_qk_pro, routes=routes, method=method)
    else:
        compute = partial(_interpolated, alpha=method.alpha)
    notes: list[str] = []
    new_findings: dict[int, Finding] = {}
    patches: dict[int, Patch] = {}
    layers = list(dict.fromkeys(row.route.layer for row in rows))
    for done, layer in enumerate(layers):
        progress("computing", done, len(layers))
        members = {number: row for number, row in enumerate(rows) if row.route.layer == layer}
        values, found = compute(list(members.values()))
        notes += found
        cache = _OneLayer(list(members.values()), compute)
        for at, (number, row) in enumerate(members.items()):
            data = tensor_bytes(values[at])
            current = bytes(read_rows(row.tuned.tensor, row.tuned.rows, row.tuned.dim))
            new_findings[number] = replace(
                findings[number],
                num_changed=num_unequal(data, current, row.tuned.tensor.item_bytes),
                sha256=hashlib.sha256(data).hexdigest(),
            )
            patches[number] = Patch(row.tuned.tensor, row.tuned.rows, row.tuned.dim, partial(cache.values, at))
    order = sorted(patches)
    return [patches[n] for n in order], [new_findings[n] for n in order], tuple(dict.fromkeys(notes))


class _OneLayer:
    """The values of a layer's rows, computed at the first call and dropped with the last."""

    def __init__(self, rows: Sequence[RowRestore], compute: _Compute) -> None:
        self.rows = rows
        self.compute = compute
        self.left: dict[int, bytes] = {}

    def values(self, at: int) -> Iterable[bytes]:
        if at not in self.left:
            values, _ = self.compute(self.rows)
            self.left = {number: tensor_bytes(value) for number, value in enumerate(values)}
        return [self.left.pop(at)]


def _interpolated(rows: Sequence[RowRestore], *, alpha: float) -> tuple[list[Tensor], tuple[str, ...]]:
    values, notes = [], []
    for row in rows:
        tuned = read_tensor(row.tuned)
        new = interpolated(tuned, read_tensor(row.start), alpha)
        values.append(new.values)
        if new.share_kept >= WORTH_A_NOTE:
            notes.append(f"rounding to {row.tuned.tensor.dtype} kept some entries at their tuned value")
    return values, tuple(notes)


def _qk_pro(rows: Sequence[RowRestore], *, routes: Routes, method: QKPro) -> tuple[list[Tensor], tuple[str, ...]]:
    by_tensor: dict[str, list[RowRestore]] = {}
    for row in rows:
        by_tensor.setdefault(row.route.parameter, []).append(row)
    layer_routes = replace(routes, routes=tuple(row.route for row in rows))
    held, starts = [], {}
    for name, members in by_tensor.items():
        piece, start = _held(name, members, layer_routes)
        held.append(piece)
        starts[name] = start
    reference = Reference(
        tensors={canonical_name(name): start for name, start in starts.items()},
        rows={piece.canonical: piece.rows for piece in held},
        dims={piece.canonical: piece.dim for piece in held},
        meaning={},
        origin="BASE",
        routes={piece.canonical: piece.routes for piece in held},
    )
    new, notes = qk_pro_values(held, layer_routes, reference, method)
    whole: dict[str, Tensor] = {}
    for piece in held:
        whole[piece.name] = piece.parameter.detach().clone()
        put_rows(whole[piece.name], piece.rows, new[piece.name], piece.dim)
    return [take_rows(whole[row.route.parameter], row.route.rows, row.route.dim) for row in rows], notes


def _held(name: str, members: Sequence[RowRestore], routes: Routes) -> tuple[Held, Tensor]:
    """One tensor as the in-memory code wants it: the whole tuned parameter, and the held rows of its start."""
    first = members[0]
    tuned = read_tensor(Slice(first.tuned.tensor, None, first.tuned.dim))
    values = {row: read_tensor(row.start) for row in members}
    start = torch.zeros(tuned.shape, dtype=next(iter(values.values())).dtype)
    for row, value in values.items():
        put_rows(start, row.route.rows, value, row.route.dim)
    rows = routes.rows_of(name)
    held = Held(
        name,
        nn.Parameter(tuned, requires_grad=False),
        rows,
        first.route.dim,
        "base",
        tuple(row.route for row in members),
    )
    return held, take_rows(start, rows, first.route.dim)
