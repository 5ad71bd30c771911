"""From a config and a list of tensors to routes: the step that models in memory and checkpoints on disk share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import cast

from routeguard.routes.architecture import Architecture
from routeguard.routes.block import Block, Found, Piece, TensorInfo, UnknownLayoutError
from routeguard.routes.collection import NORMALISED, ROLES, ROUTING_ROLES, AttentionLayer, Role, Route, Routes
from routeguard.routes.config import Config, first, rope_parameters, text_config
from routeguard.routes.decoder_stacks import attention_blocks, decoder_layers
from routeguard.routes.layer_kinds import LONG_RANGE, kinds_are_stated, layer_kinds
from routeguard.routes.notes import notes_on
from routeguard.routes.table import architecture_of, is_encoder


def resolve(
    config: Config,
    tensors: Mapping[str, TensorInfo],
    *,
    roles: Iterable[Role] = ROUTING_ROLES,
    norms: bool = False,
    shared: bool = False,
    layers: Iterable[int] | None = None,
) -> Routes:
    """Routes of a model described by its config and its parameters' names and shapes. Pure Python, no torch.

    Args:
        config: the whole `config.json` as a dict.
        tensors: canonical name (no wrapper segments) to `TensorInfo`, whose `name` is what routes report.
        roles, norms, shared, layers: as for `find_routes`.

    Raises:
        ValueError: not a decoder with full attention, or the tensors contradict the config or the table.
    """
    wanted = check_roles(roles)
    text = text_config(config)
    model_type = str(text.get("model_type", ""))
    _refuse_non_decoders(config, text)
    architecture, known = architecture_of(model_type, str(text.get("outer_model_type", "")))
    kinds = tuple((architecture.kinds or layer_kinds)(text))
    _refuse_without_full_attention(model_type, kinds)
    stacks = decoder_layers(tensors, len(kinds), architecture.stacks, architecture.aliases)
    routes: list[Route] = []
    attention: list[AttentionLayer] = []
    missing: list[int] = []
    read_blocks: list[Block] = []
    for layer, kind in enumerate(kinds):
        if kind not in LONG_RANGE:
            continue
        blocks = attention_blocks(stacks.get(layer, {}), layer, text, architecture.aliases)
        read = [(block, found) for block in blocks for found in [_read(block, architecture)] if found is not None]
        if not read:
            missing.append(layer)
        read_blocks += [block for block, _ in read]
        for block, found in read:
            routes += _routes(block, found, sparse=kind == "sparse")
            attention.append(_geometry(block, found, architecture, sparse=kind == "sparse"))
    if missing:
        if not (architecture.tied and routes):
            raise UnknownLayoutError(_explain_missing(model_type, missing, stacks, known))
        routes, attention = _share_tied(routes, attention, missing, kinds)
    if not known and not kinds_are_stated(text):
        _refuse_unlike_layers(model_type, read_blocks)
    if architecture.tied:
        routes = _place_adapters(routes, kinds)
    kept = tuple(
        route
        for route in routes
        if route.role in wanted and (norms or route.kind != "norm") and (shared or not route.shared)
    )
    found_routes = Routes(
        routes=_without_tied_repeats(kept),
        attention=tuple(attention),
        model_type=model_type,
        layer_kinds=kinds,
        num_model_parameters=sum(prod(info.shape) for info in tensors.values()),
        notes=notes_on(text, architecture, known, kinds, routes, kept),
    )
    return found_routes if layers is None else select_layers(found_routes, layers)


def select_layers(routes: Routes, layers: Iterable[int]) -> Routes:
    """Narrow to some layers. Raises ValueError, listing the layers to choose from, for one that is not covered."""
    asked = list(layers)
    if not asked:
        raise ValueError(f"layers is empty; the full-attention layers are {list(routes.layers)}")
    unknown = sorted(set(asked) - set(routes.layers))
    if unknown:
        raise ValueError(
            f"layers {unknown} have no full attention to guard (model has {len(routes.layer_kinds)} layers, 0 to "
            f"{len(routes.layer_kinds) - 1}); the full-attention layers are {list(routes.layers)}"
        )
    return routes.select(layers=asked)


def check_roles(roles: Iterable[Role]) -> tuple[Role, ...]:
    """The roles as a tuple. Raises ValueError, naming the choices, for one that does not exist."""
    asked = (roles,) if isinstance(roles, str) else tuple(roles)
    unknown = [role for role in asked if role not in ROLES]
    if unknown or not asked:
        raise ValueError(f"roles {list(unknown or asked)} not understood; choose from {', '.join(ROLES)}")
    return cast("tuple[Role, ...]", asked)


def _refuse_non_decoders(config: Config, text: Config) -> None:
    model_type = text.get("model_type")
    if is_encoder(text):
        raise ValueError(
            f"{model_type!r} is a bidirectional encoder: it has no causal full attention beside other layers to guard. "
            "If you use it as a decoder, set is_decoder=True in its config"
        )
    if text.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise ValueError(
            f"{model_type!r} is an encoder-decoder model; routeguard covers decoder-only language models (and the text "
            "decoder of multimodal ones)"
        )


def _read(block: Block, architecture: Architecture) -> Found | None:
    """The layout's answer, with the vectors that shape the logits besides queries and keys."""
    found = architecture.read()(block)
    if found is None:
        return None
    prefixes = tuple(f"{name}." for name in architecture.auxiliary)
    extra = [n for n in block.tensors if n in architecture.auxiliary or (prefixes and n.startswith(prefixes))]
    return found.extended(Piece(name, "query", "norm") for name in extra)


def _routes(block: Block, found: Found, *, sparse: bool) -> list[Route]:
    return [
        Route(
            layer=block.layer,
            role=piece.role,
            kind=piece.kind,
            parameter=block.tensors[piece.name].name,
            shape=block.tensors[piece.name].shape,
            dim=piece.dim,
            rows=piece.rows,
            dtype=block.tensors[piece.name].dtype,
            shared=piece.shared,
            sparse=sparse,
        )
        for piece in found.pieces
    ]


def _geometry(block: Block, found: Found, architecture: Architecture, *, sparse: bool) -> AttentionLayer:
    rotates = architecture.position(block.config, block.layer)
    width = found.rotary_width if found.rotary_width is not None else _rotary_dim(block.config, found.head_dim)
    return AttentionLayer(
        layer=block.layer,
        module=block.module,
        num_heads=found.num_heads,
        num_key_value_heads=found.num_key_value_heads,
        head_dim=found.head_dim,
        rotary_dim=width if rotates else 0,
        rotary_offset=found.rotary_offset,
        rotary_pairing=architecture.pairing,
        qk_norm=found.qk_norm,
        product_obstacle=found.obstacle or architecture.obstacle or (NORMALISED if found.qk_norm else None),
        sparse=sparse,
    )


def _rotary_dim(config: Config, head_dim: int) -> int:
    settings = rope_parameters(config)
    if settings.get("rope_type") == "proportional":  # turns fewer pairs, but pairs over the whole head
        return head_dim
    fraction = settings.get("partial_rotary_factor")
    if fraction is None:
        fraction = first(config, ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction"), 1.0)
    rotary = int(config.get("rotary_dim") or head_dim * float(fraction))
    return min(rotary + rotary % 2, head_dim)  # an odd width is rounded up to whole pairs


def _share_tied(
    routes: list[Route], attention: list[AttentionLayer], missing: list[int], kinds: tuple[str, ...]
) -> tuple[list[Route], list[AttentionLayer]]:
    """Give each tied layer to the block that it repeats: blocks recur in order (zamba: one, zamba2: several)."""
    owners = sorted({route.layer for route in routes})
    users = [layer for layer, kind in enumerate(kinds) if kind in LONG_RANGE]
    uses: dict[int, tuple[int, ...]] = {
        owner: tuple(layer for at, layer in enumerate(users) if layer in missing and at % len(owners) == position)
        for position, owner in enumerate(owners)
    }
    repeated = [replace(a, layer=layer) for a in attention for layer in (a.layer, *uses[a.layer])]
    return [_moved(route, route.layer, uses[route.layer]) for route in routes], sorted(repeated, key=lambda a: a.layer)


def _place_adapters(routes: list[Route], kinds: tuple[str, ...]) -> list[Route]:
    """A shared block holds one adapter for each of its uses; adapter j serves the j-th layer that uses any block."""
    users = [layer for layer, kind in enumerate(kinds) if kind in LONG_RANGE]
    adapters = [re.search(r"linear_[qk]_adapter_list\.(\d+)\.", route.parameter) for route in routes]
    return [_moved(route, users[int(a[1])]) if a else route for route, a in zip(routes, adapters, strict=True)]


def _moved(route: Route, layer: int, tied: tuple[int, ...] = ()) -> Route:
    return replace(route, layer=layer, tied_layers=tied)


def _without_tied_repeats(routes: Iterable[Route]) -> tuple[Route, ...]:
    """One route for a tensor that several layers report (tied in memory): the first keeps the others' indices."""
    unique: dict[tuple[object, ...], Route] = {}
    for route in routes:
        key = (route.parameter, route.role, route.kind, route.rows)
        if key in unique:
            earlier = unique[key]
            also = tuple(sorted({*earlier.tied_layers, route.layer} - {earlier.layer}))
            unique[key] = _moved(earlier, earlier.layer, also)
        else:
            unique[key] = route
    return tuple(unique.values())


def _refuse_without_full_attention(model_type: str, kinds: tuple[str, ...]) -> None:
    if any(kind in LONG_RANGE for kind in kinds):
        return
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    raise ValueError(
        f"{model_type!r} has no full-attention layer: its {len(kinds)} layers are {counts} "
        "('other' is linear attention, SSM, convolution or feed-forward). There is no global routing to guard"
    )


def _refuse_unlike_layers(model_type: str, blocks: list[Block]) -> None:
    """Layers that only look like full attention have other tensors beside the same q_proj and k_proj."""
    signatures = {frozenset(block.tensors): block for block in blocks}
    if len(signatures) > 1:
        one, other = list(signatures.values())[:2]
        odd = sorted(set(one.tensors) ^ set(other.tensors))[:6]
        raise UnknownLayoutError(
            f"the config of {model_type!r} does not say which layers attend fully, and "
            "they are not alike: "
            f"{one.module} and {other.module} differ in {odd}. Register a row with `kinds` "
            "(routeguard.register_architecture), or use find_routes(model, probe=True)"
        )


def _explain_missing(
    model_type: str, missing: list[int], stacks: Mapping[int, Mapping[str, TensorInfo]], known: bool
) -> str:
    layer = missing[0]
    seen = sorted({name.rsplit(".", 1)[0] for name in stacks.get(layer, {})})[:12]
    remedy = (
        ""
        if known
        else "; this model type has no row in the table: use find_routes(model, probe=True) or register_architecture"
    )
    return (
        f"the config of {model_type!r} calls layers {missing} full attention, but no query and key projections were "
        f"found in them; layer {layer} holds {seen or 'no tensors'}{remedy}"
    )
