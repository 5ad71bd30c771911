"""A model before and after "tuning": noise on every trainable parameter, so that anything left alone is seen to be."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.rows import take_rows
from routeguard.routes.collection import Route, Routes
from tests.zoo.build import build


def tune(model: nn.Module, *, seed: int = 1, size: float = 0.05) -> None:
    """Add noise to every trainable parameter, each tied tensor once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def start_and_tuned(name: str, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Two models of a zoo case: as built, and with noise on every parameter."""
    start = build(name).to(dtype)
    tuned = copy.deepcopy(start)
    tune(tuned)
    return start, tuned


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def route_values(model: nn.Module, route: Route) -> Tensor:
    """The rows of one route, concatenated."""
    return take_rows(dict(model.named_parameters())[route.parameter].detach(), route.rows, route.dim)


def with_rows_from(tuned: nn.Module, start: nn.Module, routes: Routes | Iterable[Route]) -> dict[str, Tensor]:
    """Plain reference for a restore: the tuned parameters, with the routes' rows overwritten one range at a time."""
    expected, source = values(tuned), values(start)
    for route in routes:
        for begin, end in route.rows or ((0, route.shape[route.dim]),):
            place = (slice(None),) * route.dim + (slice(begin, end),)
            expected[route.parameter][place] = source[route.parameter][place]
    return expected


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Every parameter equals its expected value, bit for bit."""
    different = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, expected[name])]
    assert not different, different
