"""Routes of a model that the table does not describe: the autograd probe's findings in the form of `find_routes`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from routeguard.routes.block import UnknownLayoutError
from routeguard.routes.collection import AttentionLayer, Kind, Role, Route, Routes, Rows, merge_rows
from routeguard.routes.config import NUM_HEADS, NUM_KEY_VALUE_HEADS, NUM_LAYERS, first, text_config
from routeguard.routes.in_memory import is_adapter_parameter, model_config, model_tensors
from routeguard.routes.probe import ProbedBlock, ProbedTensor, ProbeResult, probe_routes
from routeguard.routes.resolve import check_roles, select_layers

_OBSTACLE = "found by the autograd probe: how these rows make the logits is not known"


def routes_from_probe(
    model: nn.Module,
    *,
    layers: Iterable[int] | None = None,
    roles: Iterable[Role] = ("query", "key"),
    norms: bool = False,
    shared: bool = False,
    input_ids: Tensor | None = None,
    extra_inputs: Mapping[str, Any] | None = None,
) -> Routes:
    """Find the routes by differentiating one forward pass over a few tokens, with no table of architectures.

    Args:
        model: a model in memory with real weights.
        layers, roles, norms, shared: as for `find_routes`; the probe cannot tell the "output" role.
        input_ids: [1, tokens] to run; random tokens by default.
        extra_inputs: further arguments that the model's forward pass demands.

    Raises:
        ValueError: the role "output" asked for, no attention call seen, or no block that sees the whole context.
    """
    wanted = check_roles(roles)
    if "output" in wanted:
        raise ValueError("the probe finds queries, keys and values; the role 'output' needs a row in the table")
    result = probe_routes(model, input_ids=input_ids, extra_inputs=extra_inputs)
    blocks = [block for block in result.blocks if block.global_attention and block.layer is not None]
    if not blocks:
        reach = {block.module: block.reach_tokens for block in result.blocks}
        raise ValueError(f"the probe saw attention, but none over the whole context (longest reach in tokens: {reach})")
    text = text_config(_config_or_nothing(model))
    found = [
        route
        for block in blocks
        for route in _routes(model, block)
        if route.role in wanted and (norms or route.kind != "norm") and (shared or not route.shared)
    ]
    routes = Routes(
        routes=tuple(found),
        attention=tuple(_geometry(block, found, text) for block in blocks),
        model_type=str(text.get("model_type", type(model).__name__)),
        layer_kinds=_kinds(result, text),
        num_model_parameters=sum(parameter.numel() for parameter in model.parameters()),
        notes=("the rows were found by the autograd probe, not by the table", *result.notes),
    )
    return routes if layers is None else select_layers(routes, layers)


def probed_rows(tensor: ProbedTensor, role: Role) -> tuple[Rows, Rows]:
    """Rows of one role as (pure, shared with the values)."""
    rows = {"query": tensor.query_rows, "key": tensor.key_rows, "value": tensor.value_rows}[role]
    if role == "value":
        routing = {*_each(tensor.query_rows), *_each(tensor.key_rows)}
        return _part(rows, lambda row: row not in routing), _part(rows, lambda row: row in routing)
    values = set(_each(tensor.value_rows))
    return _part(rows, lambda row: row not in values), _part(rows, lambda row: row in values)


def kind_of(model: nn.Module, parameter: str) -> Kind:
    """ "weight" or "bias" of a projection, else "norm" (gains and other vectors)."""
    owner, _, local = parameter.rpartition(".")
    module = model.get_submodule(owner)
    name = type(module).__name__
    projects = hasattr(module, "in_features") or name.startswith(("Linear", "Conv", "Embedding"))
    vector = name.endswith(("Norm", "Clip")) or module.get_parameter(local).dim() <= 1
    if vector and not projects:
        return "norm"
    return "bias" if local == "bias" else "weight"


def _routes(model: nn.Module, block: ProbedBlock) -> Iterator[Route]:
    shapes = {info.name: info for info in model_tensors(model).values()}
    roles: tuple[Role, ...] = ("query", "key", "value")
    for tensor in block.tensors:
        if is_adapter_parameter(tensor.parameter):
            continue
        info = shapes[tensor.parameter]
        for role in roles:
            for rows, is_shared in zip(probed_rows(tensor, role), (False, True), strict=True):
                if rows:
                    whole = not info.shape or rows == ((0, info.shape[tensor.dim]),)
                    yield Route(
                        layer=block.layer or 0,
                        role=role,
                        kind=kind_of(model, tensor.parameter),
                        parameter=tensor.parameter,
                        shape=info.shape,
                        dim=tensor.dim,
                        rows=None if whole else rows,
                        dtype=info.dtype,
                        shared=is_shared,
                        sparse=bool(block.selectors),
                    )
        if tensor.bias_rows and not (tensor.query_rows or tensor.key_rows):
            yield Route(
                layer=block.layer or 0,
                role="query",
                kind="norm",
                parameter=tensor.parameter,
                shape=info.shape,
                dim=tensor.dim,
                dtype=info.dtype,
                shared=bool(tensor.value_rows),
                sparse=bool(block.selectors),
            )


def _geometry(block: ProbedBlock, routes: list[Route], text: Mapping[str, Any]) -> AttentionLayer:
    heads = first(text, NUM_HEADS)
    heads = int(heads) if isinstance(heads, int) else 1
    groups = first(text, NUM_KEY_VALUE_HEADS)
    queries = [
        r for r in routes if r.role == "query" and r.kind == "weight" and r.parameter.startswith(f"{block.module}.")
    ]
    width = max((route.num_rows for route in queries), default=heads) // heads
    normalised = any(r.kind == "norm" and r.parameter.startswith(f"{block.module}.") for r in routes)
    return AttentionLayer(
        layer=block.layer or 0,
        module=block.module,
        num_heads=heads,
        num_key_value_heads=int(groups) if isinstance(groups, int) else heads,
        head_dim=width,
        qk_norm=normalised,
        product_obstacle=_OBSTACLE,
        sparse=bool(block.selectors),
    )


def _kinds(result: ProbeResult, text: Mapping[str, Any]) -> tuple[str, ...]:
    count = first(text, NUM_LAYERS)
    known = [block.layer for block in result.blocks if block.layer is not None]
    kinds = ["other"] * max(count if isinstance(count, int) else 0, *(layer + 1 for layer in known))
    for block in result.blocks:
        if block.layer is not None:
            full = "sparse" if block.selectors else "full"
            kinds[block.layer] = full if block.global_attention else "sliding"
    return tuple(kinds)


def _config_or_nothing(model: nn.Module) -> dict[str, Any]:
    try:
        return model_config(model)
    except UnknownLayoutError:
        return {"model_type": type(model).__name__}


def _each(rows: Rows) -> Iterator[int]:
    return (row for start, stop in rows for row in range(start, stop))


def _part(rows: Rows, wanted: Any) -> Rows:
    return merge_rows((row, row + 1) for row in _each(rows) if wanted(row))
