"""`find_routes`: the one entry point to where routing lives, for a model in memory or a checkpoint on disk."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from routeguard.routes.block import UnknownLayoutError
from routeguard.routes.collection import ROUTING_ROLES, Role, Routes
from routeguard.routes.heads import Heads, select_heads
from routeguard.routes.notes import warn_if_pure_softmax
from routeguard.routes.resolve import resolve

if TYPE_CHECKING:
    from torch import nn


def find_routes(
    model: nn.Module | str | PathLike[str],
    *,
    layers: Iterable[int] | None = None,
    roles: Iterable[Role] = ROUTING_ROLES,
    norms: bool = False,
    shared: bool = False,
    heads: Heads | None = None,
    probe: bool = False,
) -> Routes:
    """Find the query and key rows of the full-attention layers.

    Args:
        model: an `nn.Module` (PEFT-wrapped, compiled, FSDP-renamed or multimodal as well; the meta device is fine), or
            the path of a checkpoint folder with `config.json` and safetensors. A path is read without torch, and
            the names are those on disk. Code in the folder never runs, so there is nothing to trust.
        layers: narrow to these decoder layer indices (a ranking's first k, for instance). Default: all full ones.
        roles: "query", "key", and for ablations "value" and "output". Default: query and key.
        norms: also the gains of query and key norms, and other vectors that shape the logits. Default: no.
        shared: also rows that feed the values too (MLA latents, tied keys and values). Default: only pure rows.
        heads: only these query heads, and the key heads that serve them: `{layer: [heads]}`, other layers are left out
            (a ranking of heads, for instance). Default: all heads.
        probe: find the rows by the autograd probe (a forward and backward pass over a few random tokens) instead of
            the table; for classes that the table does not know. Needs a model in memory with real weights.

    Returns:
        `Routes`: immutable, printable (`print(find_routes(model))`), JSON-serialisable.

    Raises:
        ValueError: nothing to guard (no full-attention layer, encoder, SSM only), a layer out of range, or a model that
            the table does not describe; the message says what was found and what to do.
    """
    options = checked({"roles": roles, "norms": norms, "shared": shared, "layers": layers})
    heads = as_heads(heads)
    if isinstance(model, (str, PathLike)):
        if probe:
            raise ValueError("probe=True needs a model in memory; load the checkpoint first")
        routes = find_on_disk(Path(model), options)
    elif probe:
        from routeguard.routes.from_probe import routes_from_probe

        routes = routes_from_probe(model, **options)
    else:
        routes = find_in_memory(model, options)
    if layers is None and heads is None:
        warn_if_pure_softmax(routes)
    return routes if heads is None else select_heads(routes, heads)


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a search, with layers and roles as tuples. Raises ValueError for what is no list of them."""
    found = {**options, "layers": as_layers(options.get("layers"))}
    return {**found, "roles": as_roles(options["roles"])} if "roles" in options else found


def as_layers(layers: Iterable[int] | None) -> tuple[int, ...] | None:
    """Layer indices as a tuple, None as it is. Raises ValueError for a bare number, text, or anything but integers."""
    if layers is None:
        return None
    try:
        return _integers(layers)
    except TypeError:
        raise ValueError(
            f"layers={layers!r} is no list of layer indices; for one layer, say, give layers=[3], and for all None"
        ) from None


def as_roles(roles: Iterable[Role]) -> tuple[Role, ...]:
    """Roles as a tuple, one by its name too, unchecked. Raises ValueError for what is no list of them."""
    try:
        return cast("tuple[Role, ...]", (roles,) if isinstance(roles, str) else tuple(roles))
    except TypeError:
        raise ValueError(
            f"roles={roles!r} is no list of roles; give for example roles={list(ROUTING_ROLES)}, the default"
        ) from None


def as_heads(heads: Heads | None) -> Heads | None:
    """Query heads by layer as integers, None as it is. Raises ValueError for what is no mapping to lists of them."""
    if heads is None:
        return None
    try:
        if not isinstance(heads, Mapping):
            raise TypeError
        return {operator.index(layer): _integers(chosen) for layer, chosen in heads.items()}
    except TypeError:
        raise ValueError(
            f"heads={heads!r} does not map layers to lists of heads; give for example {{2: [0, 3]}}"
        ) from None


def _integers(values: Iterable[int]) -> tuple[int, ...]:
    """Raises TypeError for what is none."""
    return tuple(operator.index(value) for value in values)


def find_on_disk(path: Path, options: dict[str, Any]) -> Routes:
    """`find_routes` for a checkpoint folder, without the warning about pure softmax models. No code from it runs."""
    from routeguard.storage.folder import checkpoint_config, stored_checkpoint

    if not path.is_dir():
        raise ValueError(f"{path} is not a folder with a checkpoint (config.json and safetensors)")
    return resolve(checkpoint_config(path), stored_checkpoint(path), **checked(options))


def find_in_memory(model: nn.Module, options: dict[str, Any]) -> Routes:
    """`find_routes` for a module, without the warning about pure softmax models."""
    from routeguard.routes.in_memory import model_config, model_tensors

    options = checked(options)
    try:
        routes = resolve(model_config(model), model_tensors(model), **options)
    except UnknownLayoutError as unknown:
        return _find_by_probe(model, options, unknown)
    transition = getattr(model, "state_transition", None)
    notes = routes.notes if transition is None else (*routes.notes, str(transition))
    return replace(routes, num_model_parameters=_num_parameters(model, routes.num_model_parameters), notes=notes)


def _find_by_probe(model: nn.Module, options: dict[str, Any], unknown: UnknownLayoutError) -> Routes:
    """The probe's answer where the table has none; the table's complaint if the probe cannot run either."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise unknown
    from routeguard.routes.from_probe import routes_from_probe

    try:
        routes = routes_from_probe(model, **options)
    except Exception as error:
        raise ValueError(f"{unknown}\nThe autograd probe did not help: {error}") from error
    return replace(routes, notes=(*routes.notes, f"the table was not used: {unknown}"))


def _num_parameters(model: nn.Module, logical: int) -> int:
    """Tied parameters count once; packed and sharded ones by their logical size, which `resolve` has summed."""
    seen = {id(parameter): parameter.numel() for parameter in model.parameters()}
    total = sum(seen.values())
    duplicated = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False)) - total
    return logical - duplicated
