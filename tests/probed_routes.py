"""What the autograd probe says the routes of a zoo model are, in a form that compares with `find_routes`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from routeguard.routes.collection import Route, Routes, merge_rows
from routeguard.routes.probe import ProbeResult, probe_routes
from tests.zoo.build import CASES, build, example_inputs

# Softmax attention beside the text decoder that also runs on text: not the decoder's own layers.
BESIDE_THE_DECODER = ("qformer.",)
# Two stacks of layers: the probe numbers the layers of each, the table numbers them all.
STACKED = ("hrm_text",)
# Queries and keys are averaged with each other, so the probe sees each projection in both roles.
MIXED = ("zaya", "zaya/full")

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Expected:
    """Rows of one parameter in one layer. `role` None: the logits depend on them, but not through queries or keys."""

    layer: int | None
    role: str | None
    kind: str
    parameter: str
    rows: Rows | None
    shared: bool


def probe_case(name: str) -> tuple[Any, ProbeResult]:
    """The zoo model on the CPU and what the probe finds in it."""
    model, inputs = build(name), example_inputs(name)
    ids = inputs.pop("input_ids")
    arguments: dict[str, Any] = {"extra_inputs": inputs, "entry": CASES[name].runs}
    if inputs or ids.dim() > 2:  # other inputs may have to fit the tokens
        arguments["input_ids"] = ids
    return model, probe_routes(model, **arguments)


@cache
def expected_routes(name: str) -> frozenset[Expected]:
    """Every row that moves the attention logits of a globally attending layer of the text decoder, by the probe."""
    model, result = probe_case(name)
    return frozenset(_expected(name, model, result))


def _expected(name: str, model: Any, result: ProbeResult) -> Iterator[Expected]:
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in model.named_parameters()}
    for block in result.blocks:
        if not block.global_attention or block.module.startswith(BESIDE_THE_DECODER):
            continue
        layer = None if name in STACKED else block.layer
        for tensor in block.tensors:
            for role, rows in (("query", tensor.query_rows), ("key", tensor.key_rows), (None, tensor.bias_rows)):
                kind = _kind(model, tensor.parameter)
                total = (shapes[tensor.parameter] or (1,))[tensor.dim]
                values = {row for start, stop in tensor.value_rows for row in range(start, stop)}
                listed = [row for start, stop in rows for row in range(start, stop)]
                for shared in (False, True):
                    part = merge_rows((row, row + 1) for row in listed if (row in values) == shared)
                    if part:
                        whole = part == ((0, total),)
                        shown = "norm" if role is None else kind
                        # A relative bias has a row for each distance, more than the probe's tokens reach.
                        whole = whole or role is None
                        seen = None if name in MIXED or shown == "norm" else role
                        yield Expected(layer, seen, shown, tensor.parameter, None if whole else part, shared)


def found_routes(name: str, routes: Routes) -> frozenset[Expected]:
    """The table's answer in the same form; what is used in several layers appears in each."""
    return frozenset(_found(name, route, layer) for route in routes for layer in (route.layer, *route.tied_layers))


def _found(name: str, route: Route, layer: int) -> Expected:
    rows = None if route.rows is None else merge_rows(route.rows)
    role = None if route.kind == "norm" or name in MIXED else route.role
    return Expected(None if name in STACKED else layer, role, route.kind, route.parameter, rows, route.shared)


def _kind(model: Any, parameter: str) -> str:
    """weight, bias or norm, by the class of the module that holds the parameter."""
    owner, _, local = parameter.rpartition(".")
    module = model.get_submodule(owner)
    projects = hasattr(module, "in_features") or type(module).__name__.startswith(("Linear", "Conv", "Embedding"))
    gain = type(module).__name__.endswith(("Norm", "Clip")) or module.get_parameter(local).dim() <= 1
    if gain and not projects:
        return "norm"
    return "bias" if local == "bias" else "weight"
