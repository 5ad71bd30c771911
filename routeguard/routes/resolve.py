"""From a config and a list of tensors to routes: the step that models in memory and checkpoints on disk share."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import cast

from routeguard.routes.collection import ROLES, ROUTING_ROLES, AttentionLayer, Role, Route, Routes
from routeguard.routes.config import NUM_HEADS, Config, first, rope_parameters, text_config
from routeguard.routes.layer_kinds import LONG_RANGE, layer_kinds
from routeguard.routes.layouts import Block, Found, TensorInfo
from routeguard.routes.table import Architecture, architecture_of, is_encoder

# A decoder layer inside a name: outermost container ("layers" or a synonym), index, rest.
_LAYER = re.compile(r"^(?P<stack>(?:.*?\.)?(?:layers|h|blocks|block|layer|decoder_layers))\.(?P<index>\d+)\.(?P<rest>.+)$")
_NOT_THE_DECODER = re.compile(
    r"(^|[._])(vision|visual|vit|audio|image|img|speech|talker|code2wav|code_predictor|connector|qformer|perceiver|resampler|"
    r"aligner|projector|mtp|sam|vqmodel|codec|depth_decoder|token2wav|tower|nextn|eagle|draft|assistant|embedder)([._\d]|$)"
    r"|vision_|visual_|audio_|image_|encoder\b(?!_)"
)
_NOT_SELF_ATTENTION = re.compile(
    r"(^|\.)(cross_?attn\w*|cross_?attention|encoder_attn|encoder_decoder_attention|EncDecAttention|crossattention|linear_attn|"
    r"indexer|compressor|mamba|conv|short_conv|mlstm_layer|mlp|moe|feed_forward|block_sparse_moe)(\.|$)"
)
_MARKERS = (
    "q_proj", "q_proj.linear", "qkv_proj.q_proj", "Wq", "query", "attention.query", "wq_du", "to_q", "q_b_proj",
    "q_gate_proj", "qkv_proj", "Wqkv", "query_key_value", "c_attn", "att_proj", "gqkv_proj", "kv_proj",
)  # fmt: skip
_MARKER = re.compile(rf"^(?P<module>.*?)\.?(?<![\w])(?:{'|'.join(re.escape(m) for m in _MARKERS)})\.weight$")


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
    wanted = _check_roles(roles)
    text = text_config(config)
    model_type = str(text.get("model_type", ""))
    _refuse_non_decoders(config, text)
    architecture, known = architecture_of(model_type, str(text.get("outer_model_type", "")))
    stacks = _decoder_stacks(tensors, architecture)
    kinds = (architecture.kinds or layer_kinds)(_sized(text, architecture, stacks))
    _refuse_without_full_attention(model_type, kinds)
    routes: list[Route] = []
    attention: list[AttentionLayer] = []
    missing: list[int] = []
    for layer, kind in enumerate(kinds):
        if kind not in LONG_RANGE:
            continue
        blocks = _attention_blocks(stacks.get(layer, {}), layer, text)
        read = [(block, found) for block in blocks for found in [architecture.read()(block)] if found is not None]
        if not read:
            missing.append(layer)
        for block, found in read:
            routes += _routes(block, found, sparse=kind == "sparse")
            attention.append(_geometry(block, found, architecture, sparse=kind == "sparse"))
    if missing:
        if not (architecture.tied and routes):
            raise ValueError(_explain_missing(model_type, missing, stacks, known))
        routes = _share_tied(routes, missing, kinds)
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
        notes=_notes(text, architecture, known, kinds, routes, kept),
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


def _check_roles(roles: Iterable[Role]) -> tuple[Role, ...]:
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


def _decoder_stacks(
    tensors: Mapping[str, TensorInfo], architecture: Architecture
) -> dict[int, dict[str, TensorInfo]]:
    """Tensors of each decoder layer: index to {name inside the layer: tensor}. Towers beside the decoder stay out."""
    stacks: dict[str, dict[int, dict[str, TensorInfo]]] = {}
    for name, info in tensors.items():
        match = _LAYER.match(name)
        if match is not None:
            stacks.setdefault(match["stack"], {}).setdefault(int(match["index"]), {})[match["rest"]] = info
    if architecture.stacks:
        chosen = [next((s for s in stacks if s.endswith(suffix)), None) for suffix in architecture.stacks]
        return _concatenate([stacks[s] for s in chosen if s is not None])
    candidates = {stack: layers for stack, layers in stacks.items() if not _NOT_THE_DECODER.search(stack)} or stacks
    with_attention = {s: ls for s, ls in candidates.items() if any(_markers(t) for t in ls.values())}
    if len(with_attention) > 1:
        longest = max(len(layers) for layers in with_attention.values())
        with_attention = {s: ls for s, ls in with_attention.items() if len(ls) == longest}
    if len(with_attention) > 1:
        raise ValueError(
            f"several stacks of layers could be the text decoder: {sorted(with_attention)}; register a row that names "
            "them in `stacks` (routeguard.register_architecture)"
        )
    chosen_stack = with_attention or candidates
    return next(iter(chosen_stack.values()), {})


def _concatenate(stacks: list[dict[int, dict[str, TensorInfo]]]) -> dict[int, dict[str, TensorInfo]]:
    joined: dict[int, dict[str, TensorInfo]] = {}
    for stack in stacks:
        offset = len(joined)
        joined.update({offset + i: stack[index] for i, index in enumerate(sorted(stack))})
    return joined


def _sized(text: Config, architecture: Architecture, stacks: Mapping[int, object]) -> Config:
    """Models with several stacks count their layers by what is there."""
    return {**text, "num_hidden_layers": len(stacks), "layer_types": None} if architecture.stacks else text


def _markers(tensors: Mapping[str, TensorInfo]) -> list[str]:
    return [name for name in tensors if _MARKER.match(name) and not _NOT_SELF_ATTENTION.search(name)]


def _attention_blocks(tensors: Mapping[str, TensorInfo], layer: int, config: Config) -> list[Block]:
    """The attention modules of one layer, outermost only."""
    modules = []
    for name in _markers(tensors):
        match = _MARKER.match(name)
        assert match is not None
        modules.append(match["module"])
    outermost = [m for m in dict.fromkeys(modules) if not any(m.startswith(f"{o}.") for o in modules if o != m)]
    blocks = []
    for module in outermost:
        prefix = f"{module}." if module else ""
        inside = {n.removeprefix(prefix): info for n, info in tensors.items() if n.startswith(prefix)}
        blocks.append(Block(layer, _module_name(inside, prefix), inside, config))
    return blocks


def _module_name(inside: Mapping[str, TensorInfo], prefix: str) -> str:
    local, info = next(iter(inside.items()))
    return info.name.removesuffix(local).removesuffix(".") or prefix.removesuffix(".")


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
        product_obstacle=found.obstacle or architecture.obstacle or ("queries and keys are normalised" if found.qk_norm else None),
        sparse=sparse,
    )


def _rotary_dim(config: Config, head_dim: int) -> int:
    fraction = rope_parameters(config).get("partial_rotary_factor")
    if fraction is None:
        fraction = first(config, ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction"), 1.0)
    rotary = config.get("rotary_dim")
    return min(int(rotary), head_dim) if rotary else int(head_dim * float(fraction))


def _share_tied(routes: list[Route], missing: list[int], kinds: tuple[str, ...]) -> list[Route]:
    """Give each tied layer to the block that it repeats: blocks recur in order (zamba: one, zamba2: several)."""
    owners = sorted({route.layer for route in routes})
    users = [layer for layer, kind in enumerate(kinds) if kind in LONG_RANGE]
    uses: dict[int, tuple[int, ...]] = {
        owner: tuple(layer for at, layer in enumerate(users) if layer in missing and at % len(owners) == position)
        for position, owner in enumerate(owners)
    }
    shared = []
    for route in routes:
        adapter = re.search(r"linear_[qk]_adapter_list\.(\d+)\.", route.parameter)
        if adapter:
            shared.append(_moved(route, users[int(adapter[1])]))
        else:
            shared.append(_moved(route, route.layer, uses[route.layer]))
    return shared


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


def _explain_missing(model_type: str, missing: list[int], stacks: Mapping[int, Mapping[str, TensorInfo]], known: bool) -> str:
    layer = missing[0]
    seen = sorted({name.rsplit(".", 1)[0] for name in stacks.get(layer, {})})[:12]
    remedy = "" if known else "; this model type has no row in the table: use find_routes(model, probe=True) or register_architecture"
    return (
        f"the config of {model_type!r} calls layers {missing} full attention, but no query and key projections were "
        f"found in them; layer {layer} holds {seen or 'no tensors'}{remedy}"
    )


def _notes(
    text: Config,
    architecture: Architecture,
    known: bool,
    kinds: tuple[str, ...],
    routes: list[Route],
    kept: tuple[Route, ...],
) -> tuple[str, ...]:
    notes = [architecture.note] if architecture.note else []
    left = [route for route in routes if route.shared and route.role in ROUTING_ROLES and route not in kept]
    if left:
        names = sorted({route.parameter.split(".")[-2] for route in left})
        notes.append(f"rows that also feed the values are not covered: {', '.join(names)} (ask with shared=True)")
    norms = [route for route in routes if route.kind == "norm" and route not in kept]
    if norms:
        names = sorted({".".join(route.parameter.split(".")[-2:]) for route in norms})
        notes.append(f"query and key norms are not covered: {', '.join(names)} (ask with norms=True)")
    if any(route.sparse for route in routes):
        notes.append("sparse layers: the top-k indexer is left out, it gets no gradient from the language-model loss")
    if set(kinds) <= set(LONG_RANGE):
        notes.append("every layer is full attention: the published effect of restoring Q/K is weak in such models")
    if first(text, NUM_HEADS) is None:
        notes.append("the config names no head count; it was taken from the shapes")
    return tuple(notes)


def warn_if_pure_softmax(routes: Routes) -> None:
    """Warn once a call when all layers are full attention."""
    if routes.all_layers_full:
        warnings.warn(
            f"all {len(routes.layer_kinds)} layers of {routes.model_type!r} are full attention; routeguard is made for hybrids, "
            "and in pure softmax models the published effect of protecting Q/K is weak. Narrow it with layers=... if you can",
            UserWarning,
            stacklevel=3,
        )
