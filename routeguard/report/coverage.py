"""Which tensors, rows and parameters a run held: as its guard wrote it down, or else from other files. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from routeguard.routes.collection import ROLES, Routes, route_from_json
from routeguard.routes.find import find_on_disk
from routeguard.routes.names import canonical_name
from routeguard.training.coverage import Coverage, coverage_of
from routeguard.training.run_state import RunState


def find_coverage(state: RunState, facts: Mapping[str, Any] | None, folders: list[Path]) -> Coverage | None:
    """What the run held; None where no file tells.

    Args:
        state: what the guard wrote. An earlier version left out what it held, and said only which layers and roles; the
            rest is then read from a whole checkpoint, or else from the kept start, which does not know the share.
        facts: description of the kept start (`read_facts`), if there is one.
        folders: where a checkpoint may lie, best first.
    """
    if state.coverage is not None:
        return state.coverage
    return _from_checkpoints(state, folders) or (None if facts is None else _from_kept_start(facts))


def _from_checkpoints(state: RunState, folders: list[Path]) -> Coverage | None:
    options = {"roles": state.roles, "norms": state.norms, "shared": False, "layers": state.layers}
    for folder in folders:
        try:
            return coverage_of(find_on_disk(folder, options), f"{folder.name} (checkpoint)")
        except (ValueError, OSError):
            continue  # an adapter, a sharded or a half-written checkpoint: the next may tell
    return None


def _from_kept_start(facts: Mapping[str, Any]) -> Coverage | None:
    listed = (route_from_json(data) for routes in facts["routes"].values() for data in routes)
    kept = {replace(route, parameter=canonical_name(route.parameter)) for route in listed}
    if not kept:
        return None
    ordered = sorted(kept, key=lambda route: (route.layer, ROLES.index(route.role), route.parameter))
    adapters = facts["rows"].keys() - {route.parameter for route in kept}
    routes = Routes(tuple(ordered), (), "", tuple(facts["meaning"].get("layer_kinds") or ()), 0)
    return coverage_of(routes, "the kept start, reference.safetensors", num_adapter_tensors=len(adapters))
