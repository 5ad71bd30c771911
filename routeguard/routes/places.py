"""Where a route stands among the others, for finding its counterpart where parameters go by other names. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from routeguard.routes.collection import Route

Place = tuple[int, str, str, bool, int]  # layer, role, kind, shared, position among those


def with_places(routes: Iterable[Route]) -> list[tuple[Route, Place]]:
    """Each route with its place: what identifies it when names differ."""
    counts: dict[tuple[int, str, str, bool], int] = defaultdict(int)
    placed: list[tuple[Route, Place]] = []
    for route in routes:
        group = (route.layer, route.role, route.kind, route.shared)
        placed.append((route, (*group, counts[group])))
        counts[group] += 1
    return placed


def fit_row_for_row(one: Route, other: Route) -> bool:
    """Whether two routes have equally many rows, each of the same shape."""
    return one.num_rows == other.num_rows and _row_shape(one) == _row_shape(other)


def _row_shape(route: Route) -> tuple[int, ...]:
    return route.shape[: route.dim] + route.shape[route.dim + 1 :]
