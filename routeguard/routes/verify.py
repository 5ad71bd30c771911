"""Check the table's answer for a model against the autograd probe, which knows no table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from routeguard.routes.collection import ROUTING_ROLES, Role, Routes, Rows, merge_rows
from routeguard.routes.find import find_in_memory
from routeguard.routes.from_probe import kind_of, probed_rows
from routeguard.routes.in_memory import is_adapter_parameter
from routeguard.routes.probe import ProbedBlock, probe_routes

__all__ = ["verify"]


@dataclass
class _Seen:
    """Row numbers of one parameter by role: pure, shared with the values, and everything that moves the logits."""

    module: str
    kind: str
    pure: dict[Role, set[int]] = field(default_factory=dict)
    shared: dict[Role, set[int]] = field(default_factory=dict)
    any_role: set[int] = field(default_factory=set)


def verify(
    model: nn.Module,
    routes: Routes | None = None,
    *,
    input_ids: Tensor | None = None,
    extra_inputs: Mapping[str, Any] | None = None,
    num_tokens: int = 24,
    entry: str = "",
) -> Routes:
    """Compare routes with what the probe finds in one forward and backward pass over a few tokens.

    Args:
        model: the model in memory, with real weights.
        routes: the routes to check, whole or narrowed. Default: all that `find_routes(model)` finds, and then every
            layer that attends globally has to be among them.
        input_ids, extra_inputs, num_tokens, entry: as for `probe_routes`.

    Returns:
        The routes, with a note that the probe confirms them.

    Raises:
        ValueError: they disagree; the message names the modules, parameters and rows.
    """
    complete = routes is None
    if routes is None:
        options = {"roles": ROUTING_ROLES, "norms": True, "shared": True, "layers": None}
        routes = find_in_memory(model, options)
    result = probe_routes(model, input_ids=input_ids, extra_inputs=extra_inputs, num_tokens=num_tokens, entry=entry)
    stacks = {_stack(attention.module, attention.layer) for attention in routes.attention}
    blocks = [b for b in result.blocks if b.global_attention and any(b.module.startswith(stack) for stack in stacks)]
    seen = _seen(model, blocks)
    covered = _covered_parameters(routes)
    if not complete:
        modules = {info.module for name, info in seen.items() if name in covered}
        seen = {name: info for name, info in seen.items() if info.module in modules}
    problems = [*_unfounded(routes, seen), *_missing(routes, seen, covered)]
    if problems:
        shown = "\n  ".join(problems[:12])
        more = f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise ValueError(f"the routes of {routes.model_type!r} disagree with the probe:\n  {shown}{more}")
    return replace(routes, notes=(*routes.notes, f"confirmed by the autograd probe ({len(blocks)} attention blocks)"))


def _stack(module: str, layer: int) -> str:
    """`model.layers.3.self_attn` → `model.layers.`: the part before the first number."""
    parts = module.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[:at]) + "."


def _seen(model: nn.Module, blocks: Iterable[ProbedBlock]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    for block in blocks:
        for tensor in block.tensors:
            if is_adapter_parameter(tensor.parameter):
                continue
            info = seen.setdefault(tensor.parameter, _Seen(block.module, kind_of(model, tensor.parameter)))
            for role in ROUTING_ROLES:
                pure, shared = probed_rows(tensor, role)
                info.pure.setdefault(role, set()).update(_rows(pure))
                info.shared.setdefault(role, set()).update(_rows(shared))
                info.any_role |= {*_rows(pure), *_rows(shared)}
            info.any_role |= set(_rows(tensor.bias_rows))
    return seen


def _covered_parameters(routes: Routes) -> dict[str, dict[Role, set[int]]]:
    covered: dict[str, dict[Role, set[int]]] = {}
    for route in routes:
        rows = route.rows or ((0, route.shape[route.dim] if route.shape else 1),)
        covered.setdefault(route.parameter, {}).setdefault(route.role, set()).update(_rows(rows))
    return covered


def _unfounded(routes: Routes, seen: Mapping[str, _Seen]) -> list[str]:
    """Routes on which the logits do not depend in the stated way."""
    problems = []
    for route in routes:
        if route.role not in ROUTING_ROLES:
            continue
        rows = set(_rows(route.rows or ((0, route.shape[route.dim] if route.shape else 1),)))
        info = seen.get(route.parameter)
        if info is None:
            problems.append(f"{route.parameter}: in the routes, but no global attention block depends on it")
            continue
        if route.kind == "norm":  # a position bias may have rows for distances that the probe's tokens do not reach
            wrong = set() if rows & info.any_role else rows
        else:
            wrong = rows - (info.shared if route.shared else info.pure).get(route.role, set())
        if wrong:
            what = f"{route.role} rows{' shared with the values' if route.shared else ''}"
            problems.append(f"{info.module}: {route.parameter} {what} {_show(wrong)} are not such by the probe")
    return problems


def _missing(routes: Routes, seen: Mapping[str, _Seen], covered: Mapping[str, Mapping[Role, set[int]]]) -> list[str]:
    """Pure weight and bias rows that the probe finds for a covered role and the routes leave out."""
    roles = [role for role in ROUTING_ROLES if any(route.role == role for route in routes)]
    problems = []
    for name, info in seen.items():
        if info.kind == "norm":
            continue
        held = covered.get(name, {})
        both = info.pure.get("query", set()) & info.pure.get("key", set())
        for role in roles:
            present = {row for rows in held.values() for row in rows} if len(roles) == 2 else held.get(role, set())
            own = info.pure.get(role, set())
            left = (own - both - held.get(role, set())) | ((own & both) - present if len(roles) == 2 else set())
            if left:
                problems.append(f"{info.module}: {name} {role} rows {_show(left)} are missing from the routes")
    return problems


def _rows(rows: Rows) -> Iterable[int]:
    return (row for start, stop in rows for row in range(start, stop))


def _show(rows: Iterable[int]) -> str:
    merged = merge_rows((row, row + 1) for row in rows)
    text = ", ".join(f"{start}-{stop - 1}" for start, stop in merged[:4])
    return f"{text}, ... ({len(merged)} ranges)" if len(merged) > 4 else text
