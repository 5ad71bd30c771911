"""Plain training loops on tiny zoo models, and the pieces that tests compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from routeguard import find_routes
from routeguard.protect.rows import take_rows
from routeguard.routes.collection import Routes
from tests.zoo.build import build

LOW, HIGH = 10, 80  # plain token ids of the zoo


def tiny(case: str = "lfm2", *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A tiny random model in training mode."""
    return build(case, seed=seed).to(dtype).train()


def batch(step: int, *, size: int = 2, length: int = 20) -> Tensor:
    """Token ids `[size, length]`, the same for the same step."""
    return torch.randint(LOW, HIGH, (size, length), generator=torch.Generator().manual_seed(1000 + step))


def backward(model: nn.Module, step: int) -> None:
    ids = batch(step)
    torch.manual_seed(step)  # dropout
    model(input_ids=ids, labels=ids).loss.backward()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 3,
    accumulate: int = 1,
    max_norm: float | None = 1.0,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """`steps` optimizer steps with accumulation and clipping, as the Trainer orders them."""
    for step in range(steps):
        for micro in range(accumulate):
            backward(model, step * accumulate + micro)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if after_step is not None:
            after_step(step)
        model.zero_grad()


def routed_values(model: nn.Module, routes: Routes | None = None) -> dict[str, Tensor]:
    """Name to a copy of the routed rows, by default those of `find_routes`."""
    routes = find_routes(model) if routes is None else routes
    parameters = dict(model.named_parameters())
    return {
        name: take_rows(parameters[name].detach(), routes.rows_of(name), dim_of(routes, name)).clone()
        for name in routes.parameters
    }


def dim_of(routes: Routes, name: str) -> int:
    return next(route.dim for route in routes if route.parameter == name)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Every tensor is equal bit for bit."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"differ: {different}"


def assert_moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Every tensor differs: the positive control of tests that something stands still."""
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert not same, f"did not move: {same}"
