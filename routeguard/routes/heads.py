"""Narrow routes to some attention heads: the rows of their queries, and of the keys that serve them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from routeguard.routes.collection import AttentionLayer, Route, Routes, Rows, merge_rows

Heads = Mapping[int, Iterable[int]]


def select_heads(routes: Routes, heads: Heads) -> Routes:
    """The routes of some query heads and of the key (and value) heads that serve them.

    Under grouped-query attention a key head serves several query heads: its rows go along as soon as one of them is
    chosen. Norm gains, which all heads of a layer share, are left out.

    Args:
        routes: what `find_routes` gave.
        heads: layer to its query heads, counted from 0: `{2: [0, 3]}`. Layers that are not named are left out.

    Raises:
        ValueError: no head, a layer or head that does not exist, or rows that are not grouped by heads (MLA's first
            factors, output projections).
    """
    wanted = {layer: sorted(set(chosen)) for layer, chosen in heads.items()}
    if not wanted or not all(wanted.values()):
        raise ValueError(f"heads={dict(heads)!r} names no head; give layer to query heads, for example {{2: [0, 3]}}")
    for layer, chosen in wanted.items():
        available = max(a.num_heads for a in routes.attention if a.layer == layer) if layer in routes.layers else 0
        if not available:
            raise ValueError(
                f"layer {layer} has no full attention; the full-attention layers are {list(routes.layers)}"
            )
        beyond = [head for head in chosen if not 0 <= head < available]
        if beyond:
            raise ValueError(f"layer {layer} has {available} query heads, 0 to {available - 1}; asked for {beyond}")
    kept = tuple(
        narrowed
        for route in routes
        if route.layer in wanted and route.kind != "norm"
        for narrowed in [_narrowed(route, routes.geometry_of(route), wanted[route.layer])]
    )
    if not kept:
        raise ValueError(f"no routes of layers {sorted(wanted)} are grouped by heads")
    return replace(routes.select(layers=wanted), routes=kept)


def _narrowed(route: Route, geometry: AttentionLayer, heads: list[int]) -> Route:
    if route.role == "query":
        count, chosen = geometry.num_heads, heads
    elif route.role in ("key", "value"):
        count = geometry.num_key_value_heads
        chosen = sorted({head * count // geometry.num_heads for head in heads})
    else:
        count, chosen = 0, []
    if not count or route.num_rows % count or (route.role != "value" and route.num_rows != count * geometry.head_dim):
        raise ValueError(
            f"the {route.num_rows} {route.role} rows of {route.parameter} are not grouped by heads (layer "
            f"{route.layer}), so some heads cannot be told from the others there"
        )
    width = route.num_rows // count
    ranges = [_located(route, head * width, (head + 1) * width) for head in chosen]
    rows = merge_rows(pair for part in ranges for pair in part)
    return replace(route, rows=None if rows == ((0, route.shape[route.dim]),) else rows)


def _located(route: Route, start: int, stop: int) -> Rows:
    """Rows `start` to `stop`, counted among the route's own rows, as rows of the parameter."""
    found, offset = [], 0
    for first, last in route.rows or ((0, route.shape[route.dim]),):
        begin, end = max(start, offset), min(stop, offset + last - first)
        if begin < end:
            found.append((first + begin - offset, first + end - offset))
        offset += last - first
    return tuple(found)
