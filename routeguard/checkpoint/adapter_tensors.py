"""The tensors of a PEFT adapter folder, and the routes that they act on. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from routeguard.checkpoint.adapter_base import IN_LAYER, PART, refuse_other_base
from routeguard.checkpoint.sidecar import sidecar_in
from routeguard.checkpoint.start import Start
from routeguard.routes.collection import ROUTING_ROLES, Role, Route
from routeguard.storage.folder import adapter_file, is_adapter_folder, read_json, stored_tensors
from routeguard.storage.header import StoredTensor

_TOWER = re.compile(r"(^|[._])(vision|visual|vit|audio|image|img|speech)([._]|$)|encoder\.")  # beside the text decoder


def adapter_config(folder: Path, start: Start) -> dict[str, Any]:
    """`adapter_config.json`. Raises ValueError if it is not a JSON object, or numbers layers unlike `start`."""
    config = read_json(folder / "adapter_config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'adapter_config.json'} is not a JSON object")
    if config.get("layer_replication") and not start.is_sidecar:
        raise ValueError(
            f"{folder} is an adapter with layer_replication={config['layer_replication']}: its layers are not those of "
            f"{start.origin}. Give what the guard kept (routeguard/reference.safetensors), or merge the adapter"
        )
    return config


def adapter_tensors(folder: Path, start: Start, routes: Sequence[Route]) -> dict[str, StoredTensor]:
    """Canonical name to tensor of everything that the adapter stores, under the prefix that the routes have.

    Raises ValueError when a start that is a checkpoint has not the modules that the adapter acts on.
    """
    stored = aligned(stored_tensors([adapter_file(folder)]), routes)
    if not start.is_sidecar:  # which knows only what a run held
        refuse_other_base(stored, start, routes)
    return stored


def chosen_routes(start: Start, layers: Iterable[int] | None, roles: Iterable[Role] | None, norms: bool) -> list[Route]:
    """The start's routes that were asked for; of a sidecar, by default, all it holds. ValueError for other layers."""
    everything = start.is_sidecar and roles is None
    wanted_layers = None if layers is None else set(layers)
    wanted_roles = set(roles or ROUTING_ROLES)
    known = sorted({layer for route in start.routes for layer in (route.layer, *route.tied_layers)})
    unknown = sorted((wanted_layers or set()) - set(known))
    if unknown:
        raise ValueError(f"layers {unknown} are not covered by {start.origin}; it covers {known}")
    return [
        route
        for route in start.routes
        if (wanted_layers is None or wanted_layers & {route.layer, *route.tied_layers})
        and (everything or (route.role in wanted_roles and (norms or route.kind != "norm") and not route.shared))
    ]


def spelled(name: str) -> str:
    """`…lora_B.default.weight` as adapter files spell it: `…lora_B.weight`."""
    return PART.sub(lambda m: f".{m['part']}{m['tail'] or '.weight'}", name)


def adapter_held(folder: Path, start: Start) -> str:
    """Of the adapters whose start a run kept, the one that a folder holds; "" where the start holds no adapter.

    PEFT writes the adapter "default" into a folder itself, and each other one into a subfolder of its name.

    Raises ValueError when there are several and the folder does not tell.
    """
    names = sorted({m["adapter"] for name in start.tensors for m in [PART.search(name)] if m and m["adapter"]})
    if len(names) < 2:
        return names[0] if names else ""
    others = [name for name in names if name != "default"]
    is_root = sidecar_in(folder) is not None or any(is_adapter_folder(folder / name) for name in others)
    if is_root and "default" in names:
        return "default"
    if not is_root and folder.resolve().name in others:
        return folder.resolve().name
    raise ValueError(
        f"{start.origin} holds the start of the adapters {', '.join(names)}, and {folder} does not tell which of them "
        "it is: PEFT writes 'default' into the folder of the run, and every other adapter into a subfolder of its "
        "name. Give a folder that is laid out so"
    )


def initial_names(start: Start, module: str, adapter: str) -> dict[str, str]:
    """The initial tensors that a start holds of one adapter on a module: as files spell them, to their names there."""
    found = {}
    for name in start.tensors:
        if name.startswith(f"{module}.") and name not in (f"{module}.weight", f"{module}.bias"):
            match = PART.search(name)
            if match is None or match["adapter"] in (None, adapter):
                found[spelled(name)] = name
    return found


def aligned(stored: dict[str, StoredTensor], routes: Sequence[Route]) -> dict[str, StoredTensor]:
    """The adapter's tensors under the start's prefix (`model.` against `model.language_model.`), other towers left out.

    Raises ValueError when several stacks of the adapter could be the decoder.
    """
    wanted = {match["prefix"] for route in routes for match in [IN_LAYER.match(route.parameter)] if match}
    matches = {name: IN_LAYER.match(name) for name in stored}
    prefixes = sorted({m["prefix"] for m in matches.values() if m and not _TOWER.search(m["prefix"])})
    if wanted & set(prefixes) or not prefixes or len(wanted) != 1:
        return stored
    if len(prefixes) > 1:
        raise ValueError(
            f"the adapter has tensors under {prefixes}, the start under {sorted(wanted)}: which is the decoder?"
        )
    (prefix,) = wanted
    return {f"{prefix}{m['tail']}": stored[name] for name, m in matches.items() if m and m["prefix"] == prefixes[0]}
