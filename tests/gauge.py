"""Change queries and keys in ways that must cancel in their product, to check what a layer's geometry says.

For a rotary pair, queries times a complex number c and keys times 1 / conj(c) leave every logit as it was; for
dimensions that do not rotate the same holds for any invertible matrix M and its inverse transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.routes.collection import AttentionLayer, Route, Routes


def row_index(route: Route) -> Tensor:
    """Indices of the route's rows, in head order."""
    rows = route.rows or ((0, route.shape[route.dim]),)
    return torch.cat([torch.arange(start, stop) for start, stop in rows])


def gauge(
    layer: AttentionLayer, generator: torch.Generator, *, rotary_dim: int, pairing: str, norm_preserving: bool = False
) -> tuple[Tensor, Tensor]:
    """One query and one key matrix `[head_dim, head_dim]` that cancel in the product, for a head with that rotation.

    `norm_preserving`: only turn, so that the length of queries and keys (which QK-norm takes out) stays as it is.
    """
    width = layer.head_dim
    start, stop = layer.rotary_offset, layer.rotary_offset + rotary_dim
    query = torch.zeros(width, width, dtype=torch.float64)
    key = torch.zeros(width, width, dtype=torch.float64)
    for j in range(rotary_dim // 2):
        a, b = (start + j, start + j + rotary_dim // 2) if pairing == "half" else (start + 2 * j, start + 2 * j + 1)
        angle, scale = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        angle, scale = 6 * angle, 1.0 if norm_preserving else 0.6 + scale
        turn = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64) * torch.cos(torch.tensor(angle))
        turn = turn + torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64) * torch.sin(torch.tensor(angle))
        pair = torch.tensor([a, b])
        query[pair[:, None], pair[None, :]] = scale * turn
        key[pair[:, None], pair[None, :]] = turn / scale
    rest = torch.tensor([i for i in range(width) if not start <= i < stop], dtype=torch.long)
    if len(rest):
        free = torch.eye(len(rest), dtype=torch.float64)
        free += 0.5 * torch.randn(len(rest), len(rest), generator=generator, dtype=torch.float64) / len(rest) ** 0.5
        if norm_preserving:
            free = torch.linalg.qr(free).Q
        query[rest[:, None], rest[None, :]] = free
        key[rest[:, None], rest[None, :]] = torch.linalg.inv(free).T
    return query, key


@contextmanager
def gauged(
    parameters: dict[str, nn.Parameter], routes: Routes, layer: AttentionLayer, **geometry: Any
) -> Iterator[None]:
    """Change queries and keys of one attention module by a random gauge for each key-value group, for a while."""
    generator = torch.Generator().manual_seed(0)
    groups = layer.num_key_value_heads
    pairs = [gauge(layer, generator, **geometry) for _ in range(groups)]
    saved: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for route in routes:
            if route.kind == "norm" or not route.parameter.startswith(f"{layer.module}."):
                continue
            parameter = parameters[route.parameter]
            saved.append((parameter, parameter.data))
            data = parameter.data.clone().movedim(route.dim, 0)
            index = row_index(route)
            heads = layer.num_heads if route.role == "query" else groups
            blocks = data[index].double().reshape(heads, layer.head_dim, -1)
            side = 0 if route.role == "query" else 1
            turned = torch.stack([pairs[h * groups // heads][side] @ blocks[h] for h in range(heads)])
            data[index] = turned.reshape(data[index].shape).to(data)
            parameter.data = data.movedim(0, route.dim).contiguous()
        yield
    finally:
        for parameter, data in reversed(saved):
            parameter.data = data


def attention_output(model: nn.Module, inputs: dict[str, Any], module: str) -> Tensor:
    """What one attention module gives back in a forward pass (its first output tensor)."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        while not isinstance(output, Tensor):
            output = output[0]
        seen.append(output.detach().double())

    handle = model.get_submodule(module).register_forward_hook(keep)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    assert seen, f"{module} did not run"
    return seen[0]


def sharpen(parameters: dict[str, nn.Parameter], routes: Iterable[Route], factor: float = 5.0) -> None:
    """Scale queries and keys, so that attention is far from uniform (fresh weights are small)."""
    for route in routes:
        if route.kind != "norm":
            view = parameters[route.parameter].data.movedim(route.dim, 0)
            view[row_index(route)] *= factor
