"""Where the frozen projections of an attention layer are, in a form that hooks can use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from routeguard.routes.collection import ROLES, Routes, Rows
from routeguard.routes.find import find_in_memory


@dataclass(frozen=True)
class Projections:
    """The projections of one full-attention layer.

    Attributes:
        layer: decoder layer index.
        attention: the attention module.
        sources: for "query", "key" and "value", the module that computes them and which of its output channels they are
            (None: all).
        norms: for "query" and "key", the module that normalises them, where there is one.
        output: the module that projects the heads' outputs.
        num_heads, num_key_heads: query heads, and key and value heads.
        width, value_width: of a query or key head, of a value head.
    """

    layer: int
    attention: nn.Module
    sources: dict[str, tuple[nn.Module, Rows | None]]
    norms: dict[str, nn.Module]
    output: nn.Module
    num_heads: int
    num_key_heads: int
    width: int
    value_width: int
    input_width: int

    @property
    def device(self) -> torch.device:
        return next(self.output.parameters()).device

    @staticmethod
    def channels(output: Tensor, rows: Rows | None) -> Tensor:
        """Those channels of a projection's output."""
        if rows is None:
            return output
        return torch.cat([output[..., start:stop] for start, stop in rows], dim=-1)


def find_projections(model: nn.Module, layers: tuple[int, ...] | None) -> list[Projections]:
    """The projections of the full-attention layers (those of `layers`, or all).

    Raises ValueError for layers whose queries, keys and values are not heads of plain projections: latent attention,
    values shared with keys, one attention module used by several layers, keys of another layer.
    """
    routes = find_in_memory(model, {"layers": layers, "roles": ROLES, "shared": True, "norms": True})
    return [_of_layer(model, routes, layer) for layer in routes.layers]


def _of_layer(model: nn.Module, routes: Routes, layer: int) -> Projections:
    geometry = routes.geometry(layer)
    weights = [route for route in routes.select(layers=[layer]) if route.kind == "weight"]
    if any(route.tied_layers or route.layer != layer for route in weights):
        raise _refused(layer, "it shares its attention module with other layers")
    if any(route.shared for route in weights) or geometry.sparse:
        raise _refused(layer, "its keys and values are not projections of their own (latent or sparse attention)")
    by_role = {}
    for role in ROLES:
        own = [route for route in weights if route.role == role]
        if len(own) != 1:
            raise _refused(layer, f"it has {len(own)} {role} projections ({[route.parameter for route in own]})")
        by_role[role] = own[0]
    modules = dict(model.named_modules())
    holders = {role: modules[route.parameter.rpartition(".")[0]] for role, route in by_role.items()}
    num_heads, num_key_heads = geometry.num_heads, geometry.num_key_value_heads
    width, rest = divmod(by_role["key"].num_rows, num_key_heads)
    value_width, value_rest = divmod(by_role["value"].num_rows, num_key_heads)
    if rest or value_rest or by_role["query"].num_rows != num_heads * width:
        raise _refused(layer, "its rows are not whole heads")
    return Projections(
        layer=layer,
        attention=modules[geometry.module],
        sources={role: (holders[role], by_role[role].rows) for role in ("query", "key", "value")},
        norms=_norms(modules, routes, layer),
        output=holders["output"],
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        width=width,
        value_width=value_width,
        input_width=by_role["query"].shape[1 - by_role["query"].dim],
    )


def _norms(modules: dict[str, nn.Module], routes: Routes, layer: int) -> dict[str, nn.Module]:
    """The query and key norms of a layer; ValueError where something else shapes its queries and keys."""
    found: dict[str, nn.Module] = {}
    for route in routes.select(layers=[layer], kinds=["norm"]):
        module = modules.get(route.parameter.rpartition(".")[0])
        if module is None or not route.parameter.endswith(".weight") or route.role in found:
            raise _refused(layer, f"{route.parameter} shapes its queries and keys")
        found[route.role] = module
    return found


def _refused(layer: int, why: str) -> ValueError:
    return ValueError(
        f"layer {layer} cannot get a linear path: {why}. Supported are layers with query, key, value and output "
        "projections of their own; choose others with layers="
    )
