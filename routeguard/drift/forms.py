"""What the meter computes at log steps: the drift of each layer's logit form, where weights make the logit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from routeguard.drift.routing_form import PairKernel, prepare, routing_drift
from routeguard.drift.terms import StartRows
from routeguard.protect.held import Held
from routeguard.protect.rows import take_rows
from routeguard.routes.collection import AttentionLayer, Route, Routes


def routing_forms(
    routes: Routes, held: Sequence[Held], starts: StartRows, kernel: PairKernel | None
) -> tuple[dict[int, Callable[[], Tensor]], dict[int, str]]:
    """For each layer a function giving the drift of its logit form, or the reason why there is none."""
    by_name = {h.name: h for h in held if h.part == "base"}
    forms: dict[int, Callable[[], Tensor]] = {}
    obstacles: dict[int, str] = {}
    for geometry in routes.attention:
        layer = geometry.layer
        if geometry.product_obstacle:
            obstacles[layer] = geometry.product_obstacle
            continue
        mine = [r for r in routes if r.layer == layer]
        query, key = _weight(mine, "query"), _weight(mine, "key")
        if query is None or key is None or query.parameter not in by_name or key.parameter not in by_name:
            obstacles[layer] = "queries or keys are not measured as weights here (an adapter, or one role only)"
            continue
        if query.parameter not in starts or key.parameter not in starts:
            obstacles[layer] = "queries and keys do not move"
            continue
        forms[layer] = _form(geometry, query, key, mine, by_name, starts, kernel)
    return forms, obstacles


def _form(
    geometry: AttentionLayer,
    query: Route,
    key: Route,
    routes: Sequence[Route],
    held: Mapping[str, Held],
    starts: StartRows,
    kernel: PairKernel | None,
) -> Callable[[], Tensor]:
    def bias_of(role: str) -> Route | None:
        found = next((r for r in routes if r.kind == "bias" and r.role == role), None)
        return found if found is not None and found.parameter in held and found.parameter in starts else None

    def start_of(route: Route | None) -> Tensor | None:
        return None if route is None else _rows_first(starts.of(held[route.parameter], route.rows), route)

    def now(route: Route | None) -> Tensor | None:
        if route is None:
            return None
        return _rows_first(take_rows(held[route.parameter].parameter.detach(), route.rows, route.dim), route)

    query_bias, key_bias = bias_of("query"), bias_of("key")
    start_query, start_key = start_of(query), start_of(key)
    assert start_query is not None and start_key is not None
    reference = prepare(start_query, start_key, geometry, query_bias=start_of(query_bias), key_bias=start_of(key_bias))

    def form() -> Tensor:
        new_query, new_key = now(query), now(key)
        assert new_query is not None and new_key is not None
        biases = {"query_bias": now(query_bias), "key_bias": now(key_bias)}
        return routing_drift(new_query, new_key, reference, **biases, kernel=kernel)

    return form


def _rows_first(tensor: Tensor, route: Route) -> Tensor:
    return tensor if route.dim == 0 else tensor.transpose(0, route.dim)


def _weight(routes: Sequence[Route], role: str) -> Route | None:
    found = [r for r in routes if r.role == role and r.kind == "weight"]
    return found[0] if len(found) == 1 else None
