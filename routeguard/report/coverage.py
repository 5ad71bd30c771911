"""Which tensors, rows and parameters a run held, read from its kept start and its checkpoints. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routeguard.checkpoint.sidecar import route_from_json
from routeguard.routes.collection import ROLES, Route, Routes
from routeguard.routes.find import find_on_disk
from routeguard.routes.names import canonical_name
from routeguard.training.run_state import RunState


@dataclass(frozen=True)
class CoveredLayer:
    """One full-attention layer: tensors with their held rows and all their rows, and the scalars held."""

    layer: int
    tensors: tuple[tuple[str, int, int], ...]
    num_parameters: int


@dataclass(frozen=True)
class Coverage:
    """What was held.

    Attributes:
        source: the file or folder that tells.
        layers: one entry a layer.
        num_tensors, num_rows, num_parameters, num_bytes: in all, each tensor and row once.
        dtypes: of the held tensors.
        model_type, num_layers, share: of the whole model, the share 0 to 1; None where no file tells.
        num_adapter_tensors: tensors of an adapter on them, that are guarded too.
    """

    source: str
    layers: tuple[CoveredLayer, ...]
    num_tensors: int
    num_rows: int
    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]
    model_type: str | None = None
    num_layers: int | None = None
    share: float | None = None
    num_adapter_tensors: int = 0


def find_coverage(state: RunState, facts: Mapping[str, Any] | None, folders: list[Path]) -> Coverage | None:
    """What the run held; None where neither its kept start nor a whole checkpoint is there.

    Args:
        state: the guard's settings, which say which layers and roles were covered.
        facts: description of the kept start (`read_facts`), if there is one.
        folders: where a checkpoint may lie, best first.
    """
    whole = _from_checkpoints(state, folders)
    if whole is not None:
        folder, routes = whole
        found = _coverage(f"{folder.name} (checkpoint)", routes)
        return replace(found, model_type=routes.model_type, num_layers=len(routes.layer_kinds), share=routes.share)
    return None if facts is None else _from_kept_start(facts)


def _from_checkpoints(state: RunState, folders: list[Path]) -> tuple[Path, Routes] | None:
    options = {"roles": state.roles, "norms": state.norms, "shared": False, "layers": state.layers}
    for folder in folders:
        try:
            return folder, find_on_disk(folder, options)
        except (ValueError, OSError):
            continue  # an adapter, a sharded or a half-written checkpoint: the next may tell
    return None


def _from_kept_start(facts: Mapping[str, Any]) -> Coverage | None:
    listed = (route_from_json(data) for routes in facts["routes"].values() for data in routes)
    kept = {replace(route, parameter=canonical_name(route.parameter)) for route in listed}
    if not kept:
        return None
    ordered = sorted(kept, key=lambda route: (route.layer, ROLES.index(route.role), route.parameter))
    found = _coverage("the kept start, reference.safetensors", Routes(tuple(ordered), (), "", (), 0))
    adapters = facts["rows"].keys() - {route.parameter for route in kept}
    num_layers = len(facts["meaning"].get("layer_kinds") or ()) or None
    return replace(found, num_layers=num_layers, num_adapter_tensors=len(adapters))


def _coverage(source: str, routes: Routes) -> Coverage:
    by_parameter = {route.parameter: route for route in routes}
    return Coverage(
        source=source,
        layers=tuple(_layer(layer, routes) for layer in sorted({route.layer for route in routes})),
        num_tensors=len(routes.parameters),
        num_rows=sum(_held_rows(routes, route) for route in by_parameter.values()),
        num_parameters=routes.num_parameters,
        num_bytes=routes.num_bytes,
        dtypes=tuple(sorted({route.dtype for route in routes})),
    )


def _layer(layer: int, routes: Routes) -> CoveredLayer:
    chosen = routes.select(layers=[layer])
    tensors = {r.parameter: (r.parameter, _held_rows(chosen, r), r.shape[r.dim]) for r in chosen}
    return CoveredLayer(layer, tuple(tensors.values()), chosen.num_parameters)


def _held_rows(routes: Routes, route: Route) -> int:
    rows = routes.rows_of(route.parameter)
    return route.shape[route.dim] if rows is None else sum(stop - start for start, stop in rows)
