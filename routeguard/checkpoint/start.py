"""The start that a saved checkpoint is compared with: another checkpoint, or what a guarded run kept. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from routeguard.checkpoint.sidecar import (
    digest_on_disk,
    read_facts,
    refuse_altered,
    route_from_json,
    rows_from_json,
    sidecar_in,
)
from routeguard.restoration.meaning import meaning_of_config
from routeguard.routes.collection import ROLES, Route, Rows
from routeguard.routes.names import canonical_name
from routeguard.routes.resolve import resolve
from routeguard.storage.folder import checkpoint_config, quantisation_of, stored_checkpoint, stored_tensors
from routeguard.storage.header import StoredTensor
from routeguard.storage.row_bytes import Slice, locate_rows

Place = tuple[int, str, str, bool, int]  # layer, role, kind, shared, position among those


@dataclass(frozen=True)
class Start:
    """Start values on disk.

    Attributes:
        origin: text for people.
        tensors: canonical name to where it lies.
        kept_rows: for a sidecar, canonical name to the rows that it keeps; absent names are whole.
        routes: the routes that the tensors carry, canonical names, all roles and kinds.
        is_sidecar: only what a run held is there, under the names of the model in memory, adapters included.
        meaning: facts of `restoration.meaning`.
    """

    origin: str
    tensors: Mapping[str, StoredTensor]
    kept_rows: Mapping[str, Rows | None]
    routes: Sequence[Route]
    is_sidecar: bool
    meaning: Mapping[str, Any]

    def find(self, route: Route, place: Place) -> Slice | None:
        """The start of a route: by name and shape, else by place; None if it is not there."""
        name = canonical_name(route.parameter)
        match = next((r for r in self.routes if r.parameter == name and r.shape == route.shape), None)
        rows, dim = route.rows, route.dim
        if match is None:
            match = self._places.get(place)
            if match is None or match.num_rows != route.num_rows or other_dims(match) != other_dims(route):
                return None
            name, rows, dim = match.parameter, match.rows, match.dim
        if name not in self.tensors or dim != route.dim:
            return None
        try:
            located = locate_rows(self.kept_rows.get(name), rows, total=match.shape[dim], what=name)
        except ValueError:
            return None
        return Slice(self.tensors[name], located, dim)

    @cached_property
    def _places(self) -> dict[Place, Route]:
        return {place: route for route, place in with_places(self.routes)}


def open_start(path: Path) -> Start:
    """Read a checkpoint folder's or a sidecar's header. Raises ValueError if it is neither, or was altered."""
    if not path.exists():
        raise ValueError(f"{path} does not exist (paths only: nothing is downloaded)")
    sidecar = sidecar_in(path)
    if sidecar is not None:
        return _open_sidecar(sidecar)
    if not path.is_dir():
        raise ValueError(f"{path} is neither a checkpoint folder nor a reference that routeguard wrote")
    config = checkpoint_config(path)
    refuse_quantised(path, config)
    tensors = stored_checkpoint(path)
    routes = resolve(config, tensors, roles=ROLES, norms=True, shared=True)
    named = [replace(route, parameter=canonical_name(route.parameter)) for route in routes]
    meaning = meaning_of_config(config, routes)
    return Start(f"the checkpoint {path}", tensors, {}, named, is_sidecar=False, meaning=meaning)


def refuse_quantised(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint whose weights are stored quantised."""
    method = quantisation_of(config)
    if method:
        raise ValueError(
            f"{folder} is quantised ({method}): the rows of a quantised weight mean nothing without its scales. Take "
            "the unquantised checkpoint, or load the model, call model.dequantize(), and save it"
        )


def _open_sidecar(path: Path) -> Start:
    facts = read_facts(path)
    tensors = stored_tensors([path])
    refuse_altered(path, digest_on_disk(facts, tensors), facts["digest"])
    routes = [
        replace(route, parameter=canonical_name(route.parameter))
        for members in facts["routes"].values()
        for route in map(route_from_json, members)
    ]
    rows = {name: rows_from_json(value) for name, value in facts["rows"].items()}
    return Start(
        f"{path} ({facts['origin']})",
        tensors,
        rows,
        list(dict.fromkeys(routes)),
        is_sidecar=True,
        meaning=facts["meaning"],
    )


def with_places(routes: Iterable[Route]) -> list[tuple[Route, Place]]:
    """Each route with its place: what identifies it when names differ."""
    counts: dict[tuple[int, str, str, bool], int] = defaultdict(int)
    placed: list[tuple[Route, Place]] = []
    for route in routes:
        group = (route.layer, route.role, route.kind, route.shared)
        place: Place = (*group, counts[group])
        counts[group] += 1
        placed.append((route, place))
    return placed


def other_dims(route: Route) -> tuple[int, ...]:
    """The shape without the dimension that the rows index."""
    return route.shape[: route.dim] + route.shape[route.dim + 1 :]
