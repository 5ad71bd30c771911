"""Verify a PEFT adapter folder: does the adapter leave the routing rows where they started? No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
from routeguard.checkpoint.compare import num_nonzero
from routeguard.checkpoint.start import Start
from routeguard.checkpoint.verify import TensorCheck, check_slice
from routeguard.protect.adapter_inits import ZERO_B_INITS
from routeguard.routes.collection import Role, Route
from routeguard.storage.floats import to_floats
from routeguard.storage.header import FLOATS, StoredTensor
from routeguard.storage.row_bytes import Slice, locate_rows

# How far a norm over a row may be off, relative, by how exactly it and the row are stored.
_ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-18, "float64": 2.0**-18}


def check_adapter(
    folder: Path,
    start: Start,
    *,
    layers: Iterable[int] | None,
    roles: Iterable[Role] | None,
    norms: bool,
) -> tuple[list[TensorCheck], list[str]]:
    """Check that the adapter moves none of the start's routing rows: their rows of B are zero, or equal to their start.

    Raises ValueError when the start covers none of the layers asked for, or is not the base of this adapter.
    """
    config = adapter_config(folder, start)
    routes = chosen_routes(start, layers, roles, norms)
    stored = adapter_tensors(folder, start, routes)
    adapter = adapter_held(folder, start)
    checks: list[TensorCheck] = []
    untouched = 0
    for route in routes:
        found = _check_route(route, stored, start, adapter, config)
        checks += found
        untouched += not found
    notes = [f"{untouched} of {len(routes)} routes carry no adapter: the base is frozen there"] if untouched else []
    if str(config.get("peft_type")) in ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"):
        notes.append(f"{config['peft_type']} works beside the weights; what it does to routing is not covered")
    if not checks:  # nothing saved touches the routes: they are where the frozen base has them
        checks = [
            TensorCheck(r.layer, r.role, r.kind, r.parameter, r.num_rows, r.num_parameters, note="no adapter")
            for r in routes
        ]
    return checks, notes


def _check_route(
    route: Route, stored: dict[str, StoredTensor], start: Start, adapter: str, config: dict[str, object]
) -> list[TensorCheck]:
    """Checks of everything in the adapter file that acts on a route; empty if nothing does."""
    checks = []
    saved = stored.get(route.parameter)  # a whole copy (modules_to_save), or a trained bias
    if saved is not None:
        rows = start.kept_rows.get(route.parameter)
        if route.parameter in start.tensors:
            located = locate_rows(rows, route.rows, total=route.shape[route.dim], what=saved.name)
            begin = Slice(start.tensors[route.parameter], located, route.dim)
            checks.append(check_slice(route, Slice(saved, route.rows, route.dim), begin, saved.name))
        else:
            checks.append(
                _changed(
                    route, saved, "saved with the adapter, but the start does not hold it; give the base checkpoint"
                )
            )
    if route.kind != "weight":
        return checks
    module = route.parameter.removesuffix(".weight")
    plain = (route.parameter, f"{module}.bias")
    parts = {name: tensor for name, tensor in stored.items() if name.startswith(f"{module}.") and name not in plain}
    if parts and str(config.get("peft_type")) != "LORA":
        tensor = next(iter(parts.values()))
        return [
            *checks,
            _changed(
                route, tensor, f"a {config.get('peft_type')} adapter acts on it; merge it and verify the merged model"
            ),
        ]
    initial = initial_names(start, module, adapter)
    for name, tensor in parts.items():
        checks += _check_part(route, name, tensor, initial, start, config)
    return checks


def _check_part(
    route: Route,
    name: str,
    tensor: StoredTensor,
    initial: dict[str, str],
    start: Start,
    config: dict[str, object],
) -> list[TensorCheck]:
    match = PART.search(name)
    if match is None:
        return [
            _changed(
                route, tensor, "an adapter tensor of an unknown kind; merge the adapter and verify the merged model"
            )
        ]
    part = match["part"]
    key = spelled(name) if spelled(name) in initial else None
    if part == "lora_A":
        if key is None or not _b_started_off_zero(key, initial, start):
            return []  # with B at zero, A does nothing
        return [check_slice(route, Slice(tensor, None, 0), Slice(start.tensors[initial[key]], None, 0), tensor.name)]
    found = Slice(tensor, route.rows, 0)
    if key is not None:
        original = initial[key]
        total = route.shape[route.dim]
        rows = locate_rows(start.kept_rows.get(original), route.rows, total=total, what=original)
        return [check_slice(route, found, Slice(start.tensors[original], rows, 0), tensor.name)]
    if part == "lora_magnitude_vector":
        return [_check_magnitude(route, found, start)]
    if config.get("init_lora_weights", True) not in ZERO_B_INITS:
        init = config.get("init_lora_weights")
        reason = f"init_lora_weights={init!r} did not start at zero: compare with what the guard kept"
        return [_changed(route, tensor, reason)]
    return [
        TensorCheck(
            route.layer, route.role, route.kind, tensor.name, route.num_rows, found.num_elements, num_nonzero(found)
        )
    ]


def _check_magnitude(route: Route, found: Slice, start: Start) -> TensorCheck:
    """DoRA's magnitudes start at the norms of the base's rows, so they are compared with those, up to rounding."""
    base = start.tensors.get(route.parameter)
    kinds = {found.tensor.dtype} if base is None else {found.tensor.dtype, base.dtype}
    if start.is_sidecar or base is None or not kinds <= set(FLOATS) or route.dim != 0 or len(base.shape) != 2:
        reason = (
            "DoRA's magnitude is compared only with the base's rows, or what the guard kept (reference.safetensors)"
        )
        return _changed(route, found.tensor, reason)
    weight = to_floats(b"".join(Slice(base, route.rows, 0).chunks()), base.dtype).reshape(-1, base.shape[1])
    norms = np.linalg.norm(weight.astype(np.float64), axis=1)
    magnitudes = to_floats(b"".join(found.chunks()), found.tensor.dtype).astype(np.float64)
    tolerance = max(_ROUNDING[kind] for kind in kinds)
    differing = int(np.count_nonzero(~(np.abs(magnitudes - norms) <= tolerance * norms)))
    note = f"magnitudes equal the norms of the base's rows up to rounding ({tolerance:.0e})" if not differing else ""
    return TensorCheck(
        route.layer,
        route.role,
        route.kind,
        found.tensor.name,
        route.num_rows,
        found.num_elements,
        differing,
        note=note,
    )


def _b_started_off_zero(spelled_a: str, initial: dict[str, str], start: Start) -> bool:
    name = initial.get(spelled_a.replace(".lora_A", ".lora_B"))
    return name is not None and num_nonzero(Slice(start.tensors[name], None, 0)) > 0


def _changed(route: Route, tensor: StoredTensor, reason: str) -> TensorCheck:
    return TensorCheck(
        route.layer, route.role, route.kind, tensor.name, route.num_rows, route.num_parameters, 0, reason
    )
