"""How far a tuned model moved: queries, keys, and everything."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from routeguard.drift.frobenius import squared_distance, squared_norm
from routeguard.protect.rows import take_rows
from routeguard.routes.find import find_routes


def drift(model: nn.Module, start: Mapping[str, Tensor]) -> dict[str, float]:
    """`‖W − W₀‖ / ‖W₀‖` of queries, of keys, of both ("routing"), and of all parameters ("all").

    Args:
        model: the tuned model.
        start: the parameters it started from, by name.
    """
    now = dict(model.named_parameters())
    moved: dict[str, float] = {}
    size: dict[str, float] = {}
    for route in find_routes(model):
        was = take_rows(start[route.parameter], route.rows, route.dim)
        distance = float(squared_distance(now[route.parameter].detach(), was, rows=route.rows, dim=route.dim))
        for part in (route.role, "routing"):
            moved[part] = moved.get(part, 0.0) + distance
            size[part] = size.get(part, 0.0) + float(squared_norm(was))
    moved["all"] = sum(float(squared_distance(now[name].detach(), was)) for name, was in start.items())
    size["all"] = sum(float(squared_norm(was)) for was in start.values())
    return {part: math.sqrt(moved[part] / size[part]) for part in moved}
