"""Restore a PEFT adapter on disk: bring its tensors on the routes back to their initial values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from routeguard.checkpoint.adapter_base import PART
from routeguard.checkpoint.adapter_tensors import (
    adapter_config,
    adapter_held,
    adapter_tensors,
    chosen_routes,
    initial_names,
    spelled,
)
from routeguard.checkpoint.compare import num_nonzero, num_unequal, why_not_comparable
from routeguard.checkpoint.patch import Patch
from routeguard.checkpoint.start import Start
from routeguard.protect.adapter_inits import ZERO_B_INITS
from routeguard.protect.modes import Interpolate, QKPro, Restoration
from routeguard.restoration.report import LayerRestore, RestoreReport, describe_method
from routeguard.routes.collection import Role, Route, Rows, count_rows, merge_rows
from routeguard.storage.floats import converted, to_bytes, to_floats
from routeguard.storage.header import StoredTensor
from routeguard.storage.row_bytes import Slice, locate_rows, read_rows

_REMEDY = (
    "give what the guard kept (routeguard/reference.safetensors) as BASE, or "
    "merge the adapter (merge_and_unload) and restore the merged model"
)


@dataclass(frozen=True)
class _Part:
    """A tensor of the adapter file, the rows of it that go back, and their initial bytes in its own dtype."""

    route: Route
    tensor: StoredTensor
    rows: Rows | None
    dim: int
    initial: Callable[[], bytes]


@dataclass
class _Planner:
    """Finds the initial values of one adapter's tensors, module by module. `adapter` is its name in the start."""

    start: Start
    adapter: str
    config: dict[str, Any]
    stored: Mapping[str, StoredTensor]
    parts: list[_Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def module(self, routes: Sequence[Route]) -> None:
        """Plan everything that the adapter has on one routed parameter."""
        route = routes[0]
        rows = _merged(routes)
        whole = self.stored.get(route.parameter)  # modules_to_save, or a trained bias
        if whole is not None:
            self._whole_copy(route, whole, rows)
        if route.kind != "weight":
            return
        module = route.parameter.removesuffix(".weight")
        plain = (route.parameter, f"{module}.bias")
        mine = {name: t for name, t in self.stored.items() if name.startswith(f"{module}.") and name not in plain}
        known = initial_names(self.start, module, self.adapter)
        initial = {name: known[spelled(name)] for name in mine if spelled(name) in known}
        if mine and len(initial) == len(mine):
            self._from_kept(route, mine, initial, rows)
        elif initial:
            absent = sorted(set(mine) - set(initial))
            raise ValueError(f"{self.start.origin} has only some of the initial tensors on {module}; it lacks {absent}")
        elif mine:
            self._from_base(route, mine, rows)

    def _whole_copy(self, route: Route, tensor: StoredTensor, rows: Rows | None) -> None:
        if route.parameter not in self.start.tensors:
            raise ValueError(
                f"{tensor.name} is saved whole with the adapter, and {self.start.origin} does not hold it; give the "
                "base checkpoint as BASE"
            )
        located = locate_rows(
            self.start.kept_rows.get(route.parameter), rows, total=route.shape[route.dim], what=tensor.name
        )
        self._add(route, tensor, rows, route.dim, Slice(self.start.tensors[route.parameter], located, route.dim))

    def _from_kept(
        self, route: Route, mine: Mapping[str, StoredTensor], initial: Mapping[str, str], rows: Rows | None
    ) -> None:
        """The start holds the adapter's initial tensors. A serves rows beside the routes too, then it stays."""
        starts = {name: Slice(self.start.tensors[at], None, 0) for name, at in initial.items()}
        for name, tensor in mine.items():
            match = PART.search(name)
            if match is None or match["part"] != "lora_A":
                take = rows if match is not None else None
                kept = self.start.kept_rows.get(initial[name])
                located = locate_rows(kept, take, total=route.shape[route.dim], what=name)
                self._add(route, tensor, take, 0, Slice(self.start.tensors[initial[name]], located, 0))
            elif rows is None:
                self._add(route, tensor, None, 0, starts[name])
            elif num_nonzero(starts[name.replace("lora_A", "lora_B")]) and _bytes(Slice(tensor, None, 0)) != _bytes(
                starts[name]
            ):
                raise ValueError(
                    f"{route.parameter} is routing in part, its adapter did not start at zero and lora_A has moved: "
                    "no value of the routing rows of lora_B gives the start back and leaves the others alone. Merge "
                    "the adapter and restore the merged model"
                )

    def _from_base(self, route: Route, mine: Mapping[str, StoredTensor], rows: Rows | None) -> None:
        """Only base weights are known: B goes to zero, DoRA's magnitude to the row norms of the base weight."""
        if str(self.config.get("peft_type")) != "LORA":
            kind = self.config.get("peft_type")
            raise ValueError(f"a {kind} adapter acts on {route.parameter}; its start is not known: {_REMEDY}")
        if self.config.get("init_lora_weights", True) not in ZERO_B_INITS:
            init = self.config.get("init_lora_weights")
            raise ValueError(f"init_lora_weights={init!r} did not start at zero on {route.parameter}: {_REMEDY}")
        for name, tensor in mine.items():
            match = PART.search(name)
            if match is None:
                raise ValueError(
                    f"{tensor.name} is an adapter tensor of an unknown kind on {route.parameter}: {_REMEDY}"
                )
            if match["part"] == "lora_B":
                size = Slice(tensor, rows, 0).num_bytes
                self.parts.append(_Part(route, tensor, rows, 0, lambda size=size: bytes(size)))  # type: ignore[misc]
            elif match["part"] == "lora_magnitude_vector":
                data = self._row_norms(route, tensor, rows)
                self.parts.append(_Part(route, tensor, rows, 0, lambda data=data: data))  # type: ignore[misc]

    def _row_norms(self, route: Route, magnitude: StoredTensor, rows: Rows | None) -> bytes:
        """DoRA's magnitude before training: PEFT's norm of each row of the base weight, in the base's dtype."""
        base = self.start.tensors.get(route.parameter)
        if base is None or self.start.kept_rows.get(route.parameter) is not None:
            raise ValueError(
                f"DoRA's magnitude on {route.parameter} started at the row norms of the base weight, which "
                f"{self.start.origin} does not hold; give the base checkpoint as BASE"
            )
        import torch

        from routeguard.checkpoint.tensors import read_tensor, tensor_bytes

        weight = read_tensor(Slice(base, rows, route.dim))
        weight = weight if route.dim == 0 else weight.T
        norms = torch.linalg.norm(weight, dim=1).to(weight.dtype).to(getattr(torch, magnitude.dtype))
        return tensor_bytes(norms)

    def _add(self, route: Route, tensor: StoredTensor, rows: Rows | None, dim: int, start: Slice) -> None:
        reason = why_not_comparable(Slice(tensor, rows, dim), start)
        if reason:
            raise ValueError(f"{tensor.name} does not fit its start in {self.start.origin}: {reason}")

        def initial() -> bytes:
            return converted(_bytes(start), start.tensor.dtype, tensor.dtype)

        self.parts.append(_Part(route, tensor, rows, dim, initial))


def plan_adapter(
    folder: Path, start: Start, mode: Restoration, roles: Iterable[Role], layers: Iterable[int] | None, norms: bool
) -> tuple[list[Patch], RestoreReport, list[dict[str, Any]]]:
    """Patches that take an adapter off the routes, the report, and one record of provenance for each patch.

    Raises ValueError when nothing in the adapter acts on the routes, or its initial values are not known.
    """
    if isinstance(mode, QKPro):
        raise ValueError(
            "QK-Pro needs whole weights: merge the adapter (merge_and_unload) and restore the merged model"
        )
    config = adapter_config(folder, start)
    routes = chosen_routes(start, layers, tuple(roles), norms)
    stored = adapter_tensors(folder, start, routes)
    planner = _Planner(start, adapter_held(folder, start), config, stored)
    by_parameter: dict[str, list[Route]] = {}
    for route in routes:
        by_parameter.setdefault(route.parameter, []).append(route)
    for members in by_parameter.values():
        planner.module(members)
    if not planner.parts:
        raise ValueError(
            f"nothing in {folder} acts on the {len(routes)} routes of {start.origin} (first: {routes[0].parameter}): "
            "the base is frozen there, so there is nothing to restore"
        )
    patches, facts = [], []
    layers_done: dict[int, list[tuple[_Part, int]]] = {}
    for part in planner.parts:
        patch, changed, record = _patch(part, mode)
        patches.append(patch)
        facts.append(record)
        layers_done.setdefault(part.route.layer, []).append((part, changed))
    report = RestoreReport(
        f"{describe_method(mode, routes)} of an adapter",
        start.origin,
        tuple(_layer(layer, members) for layer, members in sorted(layers_done.items())),
        (*planner.notes, "the base weights below the adapter are not in this folder and were not looked at"),
    )
    return patches, report, facts


def _patch(part: _Part, mode: Restoration) -> tuple[Patch, int, dict[str, Any]]:
    """The patch, how many entries it changes, and its record."""
    data, current = part.initial(), _bytes(Slice(part.tensor, part.rows, part.dim))
    if isinstance(mode, Interpolate):
        match = PART.search(part.tensor.name)
        if match and match["part"] == "lora_B" and any(data):
            raise ValueError(
                f"{part.tensor.name} did not start at zero, so ΔW cannot be shrunk inside it; merge the adapter and "
                "interpolate the merged model"
            )
        if match and match["part"] == "lora_A":
            data = current
        elif mode.alpha < 1:
            now, then = to_floats(current, part.tensor.dtype), to_floats(data, part.tensor.dtype)
            weights = (now.dtype.type(1 - mode.alpha), now.dtype.type(mode.alpha))
            data = to_bytes(weights[0] * now + weights[1] * then, part.tensor.dtype)
    if not np.isfinite(to_floats(data, part.tensor.dtype)).all():
        raise ValueError(f"the initial values of {part.tensor.name} are not finite")
    changed = num_unequal(data, current, part.tensor.item_bytes)
    record = {
        "layer": part.route.layer,
        "role": part.route.role,
        "kind": part.route.kind,
        "tensor": part.tensor.name,
        "file": part.tensor.file.name,
        "rows": part.rows,
        "dim": part.dim,
        "dtype": part.tensor.dtype,
        "changed_entries": changed,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return Patch(part.tensor, part.rows, part.dim, lambda: [data]), changed, record


def _layer(layer: int, members: Sequence[tuple[_Part, int]]) -> LayerRestore:
    return LayerRestore(
        layer=layer,
        tensors=tuple(part.tensor.name for part, _ in members),
        num_rows=sum(_num_rows(part) for part, _ in members if "lora_A" not in part.tensor.name),
        drift_before={},
        changed_bytes=sum(changed * part.tensor.item_bytes for part, changed in members),
    )


def _num_rows(part: _Part) -> int:
    return part.tensor.shape[part.dim] if part.rows is None else count_rows(part.rows)


def _merged(routes: Sequence[Route]) -> Rows | None:
    if any(route.rows is None for route in routes):
        return None
    rows = merge_rows(pair for route in routes for pair in route.rows or ())
    return None if rows == ((0, routes[0].shape[routes[0].dim]),) else rows


def _bytes(part: Slice) -> bytes:
    return bytes(read_rows(part.tensor, part.rows, part.dim))
