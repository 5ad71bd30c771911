"""Put routing back in a model in memory, for good (`restore`) or for a while (`restored`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held, held_parameters, without_idle_adapters
from routeguard.protect.modes import QKPro, QKRestore, Restoration, as_restoration
from routeguard.protect.rows import put_rows, take_rows
from routeguard.restoration.adapters import adapted_modules, adapter_drift, refuse_merged, restored_adapter
from routeguard.restoration.lookup import open_reference
from routeguard.restoration.meaning import check_same_meaning, meaning_of
from routeguard.restoration.methods import interpolated, qk_pro_values, refuse_other_roles
from routeguard.restoration.reference import Reference, refuse_unreadable
from routeguard.restoration.report import (
    WORTH_A_NOTE,
    LayerRestore,
    RestoreReport,
    conversion_notes,
    describe_method,
    refuse_not_finite,
)
from routeguard.restoration.sources import ReferenceSource
from routeguard.routes.collection import ROUTING_ROLES, Role, Route, Routes
from routeguard.routes.find import find_routes
from routeguard.routes.heads import Heads
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.wording import first_of
from routeguard.sharding.split import is_split


@dataclass(frozen=True, eq=False)
class _Change:
    """New values for the held rows of one parameter."""

    held: Held
    values: Tensor


def restore(
    model: nn.Module,
    reference: ReferenceSource,
    *,
    method: str | Restoration = "qk",
    roles: Iterable[Role] = ROUTING_ROLES,
    layers: Iterable[int] | None = None,
    heads: Heads | None = None,
    norms: bool = False,
    insist: bool = False,
    routes: Routes | None = None,
) -> RestoreReport:
    """Put the queries and keys of the full-attention layers back to their start, in place; all else stays as tuned.

    Args:
        model: the tuned model, wrapped in PEFT, `torch.compile` or DDP or not. Of several adapters the active ones are
            restored.
        reference: the start: a model, a state dict, a checkpoint folder, a safetensors file, what a guarded run kept.
        method: "qk" (QK-Restore, the paper's Algorithm 1), "qk_pro" (ridge form, §7.4), "interpolate", or one of the
            objects `QKRestore()`, `QKPro(ridge=…)`, `Interpolate(alpha=…)`. Default "qk".
        roles: "query", "key", and for ablations "value" and "output". Default: query and key.
        layers: only these decoder layers. Default: every full-attention layer.
        heads: only these query heads and the key heads that serve them, `{layer: [heads]}`. Default: all.
        norms: also the gains of query and key norms. Default: no (as in the paper).
        insist: go on although the two models differ in what gives the weights their meaning. Default: no.
        routes: routes of `model`, if at hand; `roles`, `layers`, `heads` and `norms` are then taken from them.

    Returns:
        A `RestoreReport`: per layer the tensors, rows, drift before, bytes changed; and notes.

    Raises:
        ValueError: another model, missing tensors, NaN, merged adapters, an adapter whose start the reference does not
            hold, a layer where QK-Pro is not defined, parameters split over processes. The model is then unchanged.
    """
    changes, report = _plan(model, reference, method, roles, layers, heads, norms, insist, routes)
    _write(changes)
    return report


@contextmanager
def restored(
    model: nn.Module,
    reference: ReferenceSource,
    *,
    method: str | Restoration = "qk",
    roles: Iterable[Role] = ROUTING_ROLES,
    layers: Iterable[int] | None = None,
    heads: Heads | None = None,
    norms: bool = False,
    insist: bool = False,
    routes: Routes | None = None,
) -> Iterator[RestoreReport]:
    """`with restored(model, start): evaluate(model)`: repaired weights inside, the tuned ones back bit for bit after.

    Arguments and errors are those of `restore`. The tuned rows come back on exceptions too.
    """
    changes, report = _plan(model, reference, method, roles, layers, heads, norms, insist, routes)
    tuned = [
        replace(change, values=take_rows(change.held.parameter.detach(), change.held.rows, change.held.dim).clone())
        for change in changes
    ]
    _write(changes)
    try:
        yield report
    finally:
        _write(tuned)


@torch.no_grad()
def _write(changes: Sequence[_Change]) -> None:
    for change in changes:
        put_rows(change.held.parameter, change.held.rows, change.values, change.held.dim)


@torch.no_grad()
def _plan(
    model: nn.Module,
    source: ReferenceSource,
    method: str | Restoration,
    roles: Iterable[Role],
    layers: Iterable[int] | None,
    heads: Heads | None,
    norms: bool,
    insist: bool,
    routes: Routes | None,
) -> tuple[list[_Change], RestoreReport]:
    """Everything `restore` is about to write, and what it will say; changes nothing."""
    mode = as_restoration(method)
    if routes is None:
        routes = find_routes(model, roles=roles, layers=layers, heads=heads, norms=norms)
    if isinstance(mode, QKPro):
        refuse_other_roles(routes)
    refuse_merged(model, routes.routes)
    held, idle = without_idle_adapters(model, held_parameters(model, routes))
    for piece in held:
        _refuse_split(piece)
        refuse_unreadable(piece)
    reference = open_reference(source, model, held)
    notes = [*check_same_meaning(meaning_of(model), reference.meaning, insist=insist), *reference.notes]
    if idle:
        notes.append(
            f"left as they were, because they are not active: the adapters {', '.join(idle)} (to restore one, make it "
            "active with model.set_adapter(name))"
        )
    movable = [piece for piece in held if not is_quantised(piece.parameter)]
    if len(movable) < len(held):
        notes.append(
            f"{len(held) - len(movable)} routed base weights are quantised and carry no adapter: they cannot have "
            "moved, and are left alone (nothing is requantised)"
        )
    _refuse_not_finite(movable, reference)
    values, method_notes = _new_values(model, movable, routes, reference, mode)
    changes = [_Change(piece, values[piece.name]) for piece in movable if piece.name in values]
    _refuse_overflow(changes)
    notes += [*conversion_notes(_dtypes(movable, reference)), *method_notes]
    per_layer = _per_layer(model, routes, changes, movable, reference)
    if changes and not any(layer.changed_bytes for layer in per_layer):
        notes.append("nothing had moved: every row already equals what was written")
    return changes, RestoreReport(describe_method(mode, routes), reference.origin, per_layer, tuple(notes))


def _refuse_split(piece: Held) -> None:
    if is_split(piece.parameter):
        raise ValueError(
            f"{piece.name}, or what DeepSpeed trains in its place, is split over processes, and a restore here would "
            "write to a part of it only. At the end of training RouteGuard(protect=Track(), restore=QKRestore()) "
            "restores it; else save the model and repair that: routeguard restore BASE TUNED --out FIXED"
        )


def _refuse_not_finite(held: Sequence[Held], reference: Reference) -> None:
    bad = [f"{p.name} in the model" for p in held if not _finite(take_rows(p.parameter.detach(), p.rows, p.dim))]
    bad += [f"{name} in the reference" for name, values in reference.tensors.items() if not _finite(values)]
    refuse_not_finite(bad)


def _finite(values: Tensor) -> bool:
    """A NaN or an infinity makes the sum not finite; such a sum (it may have overflowed) gets a closer look."""
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())


def _refuse_overflow(changes: Sequence[_Change]) -> None:
    beyond = [change.held for change in changes if not _finite(change.values)]
    if beyond:
        dtype = str(beyond[0].parameter.dtype).removeprefix("torch.")
        raise ValueError(
            f"the start of {first_of([held.name for held in beyond])} has entries beyond the range of {dtype}, and "
            "would become infinite; convert the model to a wider type first (model.float())"
        )


def _new_values(
    model: nn.Module, held: Sequence[Held], routes: Routes, reference: Reference, mode: Restoration
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    values: dict[str, Tensor] = {}
    for group in adapted_modules(held).values():
        values |= restored_adapter(model, group, reference, mode)
    base = [piece for piece in held if piece.part == "base"]
    if isinstance(mode, QKPro):
        pro, notes = qk_pro_values(base, routes, reference, mode) if base else ({}, ())
        return values | pro, notes
    lost = 0.0
    for piece in base:
        start = reference.values(piece.canonical, piece.rows, piece.dim)
        if isinstance(mode, QKRestore):
            values[piece.name] = start.to(piece.parameter.dtype)
        else:
            tuned = take_rows(piece.parameter.detach(), piece.rows, piece.dim)
            new = interpolated(tuned, start, mode.alpha)
            values[piece.name] = new.values
            lost = max(lost, new.share_kept)
    if lost >= WORTH_A_NOTE:
        dtype = str(base[0].parameter.dtype).removeprefix("torch.")
        return values, (f"rounding to {dtype} kept up to {lost:.0%} of a tensor's entries at their tuned value",)
    return values, ()


def _dtypes(held: Sequence[Held], reference: Reference) -> list[tuple[str, str]]:
    """The dtypes of each start and of what it is written to."""
    starts = [(reference.tensors[p.canonical], p.parameter) for p in held if p.canonical in reference.tensors]
    return [(str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch.")) for a, b in starts]


def _per_layer(
    model: nn.Module, routes: Routes, changes: Sequence[_Change], held: Sequence[Held], reference: Reference
) -> tuple[LayerRestore, ...]:
    drift = _drift_before(model, routes, held, reference)
    by_layer: dict[int, list[_Change]] = {}
    for change in changes:
        by_layer.setdefault(change.held.routes[0].layer, []).append(change)
    return tuple(
        LayerRestore(
            layer=layer,
            tensors=tuple(change.held.name for change in members),
            num_rows=sum(c.values.shape[c.held.dim] for c in members if c.held.part != "lora_A"),
            drift_before={role: value for (at, role), value in drift.items() if at == layer},
            changed_bytes=sum(_changed_bytes(change) for change in members),
        )
        for layer, members in sorted(by_layer.items())
    )


def _drift_before(
    model: nn.Module, routes: Routes, held: Sequence[Held], reference: Reference
) -> dict[tuple[int, str], float]:
    """(layer, role) to ‖W − W₀‖ / ‖W₀‖ over the weights of that role."""
    bases = {piece.name: piece for piece in held if piece.part == "base"}
    groups = adapted_modules(held)
    sums: dict[tuple[int, str], tuple[float, float] | None] = {}
    for route in routes:
        if route.kind != "weight":
            continue
        squares: tuple[float, float] | None = None
        if route.parameter in groups:
            squares = adapter_drift(model, groups[route.parameter], reference, route)
        elif route.parameter in bases:
            squares = _base_drift(bases[route.parameter], route, reference)
        cell = (route.layer, route.role)
        so_far = sums.get(cell, (0.0, 0.0))
        sums[cell] = None if squares is None or so_far is None else (so_far[0] + squares[0], so_far[1] + squares[1])
    return {cell: (s[0] / s[1]) ** 0.5 for cell, s in sums.items() if s is not None and s[1] > 0}


def _base_drift(piece: Held, route: Route, reference: Reference) -> tuple[float, float]:
    start = reference.values(piece.canonical, route.rows, route.dim).float()
    tuned = take_rows(piece.parameter.detach(), route.rows, route.dim).float().cpu()
    return float(torch.linalg.vector_norm(tuned - start)) ** 2, float(torch.linalg.vector_norm(start)) ** 2


def _changed_bytes(change: _Change) -> int:
    now = take_rows(change.held.parameter.detach(), change.held.rows, change.held.dim)
    return int((now != change.values.to(now.device)).sum()) * now.element_size()
