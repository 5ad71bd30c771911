"""What the meter adds up of LoRA and DoRA adapters: how far all of them together moved each routed weight.

From small factors wherever that is exact: any number of LoRA adapters, or one DoRA adapter that started at zero. What
has no such form (DoRA beside another adapter, or from a PiSSA or OLoRA start) is formed as dense rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from routeguard.drift.adapters import dora_delta_norm, lora_delta_distance
from routeguard.drift.frobenius import compute_dtype, squared_norm
from routeguard.drift.terms import Term, rows_within
from routeguard.protect.held import LoraPair, lora_pairs
from routeguard.protect.rows import put_rows, take_rows
from routeguard.routes.collection import Route, Routes, Rows
from routeguard.routes.names import without_late_wrappers


@dataclass(frozen=True)
class _Adapter:
    """One adapter and its start: A whole, of the rest the held rows. `m0` is None for LoRA, `bias0` without a bias."""

    pair: LoraPair
    a0: Tensor
    b0: Tensor
    m0: Tensor | None
    bias0: Tensor | None


def lora_terms(model: nn.Module, routes: Routes, starts: Mapping[str, Tensor]) -> list[Term]:
    """‖ΔW − ΔW₀‖ of the held rows, relative to the base weight's rows, for each route with adapters that can move.

    Where B has a bias of its own, it moves the output's bias, which counts as a bias does in full fine-tuning.
    """
    names = {id(parameter): without_late_wrappers(name) for name, parameter in model.named_parameters()}
    by_weight: dict[int, list[_Adapter]] = {}
    for pair in lora_pairs(model, routes):
        a0, b0 = starts.get(names[id(pair.a)]), starts.get(names[id(pair.b)])
        if b0 is None:
            continue
        m0 = None if pair.magnitude is None else starts.get(names[id(pair.magnitude)])
        if pair.magnitude is not None and m0 is None:  # it does not move, and so needs no start
            m0 = take_rows(pair.magnitude.detach(), pair.rows).clone()
        bias0 = None if pair.bias is None else starts.get(names[id(pair.bias)])
        adapter = _Adapter(pair, pair.a.detach().clone() if a0 is None else a0, b0, m0, bias0)
        by_weight.setdefault(id(pair.base_layer), []).append(adapter)
    on_routes = [(adapters, route) for adapters in by_weight.values() for route in adapters[0].pair.routes]
    with_bias = [on for on in on_routes if any(adapter.bias0 is not None for adapter in on[0])]
    return [_term(*on) for on in on_routes] + [_bias_term(*on) for on in with_bias]


def _term(adapters: Sequence[_Adapter], route: Route) -> Term:
    first = adapters[0]
    within = rows_within(route.rows, first.pair.rows)
    start_squared = squared_norm(take_rows(_base_weight(first.pair, route.dim), route.rows))

    def squared() -> Tensor:
        if all(adapter.m0 is None for adapter in adapters):
            return _lora_squared(adapters, route.rows, within)
        if len(adapters) == 1 and starts_at_zero:
            return _dora_squared(first, route, within)
        now, start = _dense(adapters, route, within)
        return (now - start).square().sum().float()

    starts_at_zero = not first.b0.any()
    return Term((route.layer, route.role), squared, start_squared)


def _bias_term(adapters: Sequence[_Adapter], route: Route) -> Term:
    pair = adapters[0].pair
    within = rows_within(route.rows, pair.rows)

    def squared() -> Tensor:
        moved = [
            x.pair.scale * (take_rows(x.pair.bias.detach(), route.rows) - take_rows(x.bias0, within)).float()
            for x in adapters
            if x.pair.bias is not None and x.bias0 is not None
        ]
        return torch.stack(moved).sum(0).square().sum()

    return Term((route.layer, route.role), squared, squared_norm(take_rows(pair.base_layer.bias.detach(), route.rows)))


def _lora_squared(adapters: Sequence[_Adapter], rows: Rows | None, within: Rows | None) -> Tensor:
    """Adapters beside each other are one of their joint rank: `ΣsBA` is the product of their stacked factors."""
    a, a0 = (torch.cat(each) for each in zip(*((x.pair.a.detach(), x.a0) for x in adapters), strict=True))
    b = torch.cat([_scaled(take_rows(x.pair.b.detach(), rows), x.pair.scale) for x in adapters], 1)
    b0 = torch.cat([_scaled(take_rows(x.b0, within), x.pair.scale) for x in adapters], 1)
    return lora_delta_distance(a, b, a0, b0).square()


def _scaled(b: Tensor, scale: float) -> Tensor:
    return scale * b.to(compute_dtype(b))


def _dora_squared(adapter: _Adapter, route: Route, within: Rows | None) -> Tensor:
    pair, m0 = adapter.pair, adapter.m0
    assert pair.magnitude is not None and m0 is not None
    start = take_rows(m0, within)
    if route.rows is not None:
        start = torch.zeros_like(pair.magnitude.detach())
        put_rows(start, route.rows, take_rows(m0, within))
    base = _base_weight(pair, route.dim)
    moved = dora_delta_norm(
        base,
        pair.a.detach(),
        pair.b.detach(),
        pair.scale,
        pair.magnitude.detach(),
        start_magnitude=start,
        rows=route.rows,
    )
    return moved.square()


@torch.no_grad()
def _dense(adapters: Sequence[_Adapter], route: Route, within: Rows | None) -> tuple[Tensor, Tensor]:
    """The routed rows as the model applies them, now and at the start."""
    base = take_rows(_base_weight(adapters[0].pair, route.dim), route.rows)
    base = base.to(compute_dtype(base))
    now, start = base, base
    for x in adapters:
        m = None if x.pair.magnitude is None else take_rows(x.pair.magnitude.detach(), route.rows)
        m0 = None if x.m0 is None else take_rows(x.m0, within)
        now = now + _applied(base, x.pair.a.detach(), take_rows(x.pair.b.detach(), route.rows), x.pair.scale, m) - base
        start = start + _applied(base, x.a0, take_rows(x.b0, within), x.pair.scale, m0) - base
    return now, start


def _applied(base: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    tuned = base + scale * (b.to(base.dtype) @ a.to(base.dtype))
    if magnitude is None:
        return tuned
    norm = torch.linalg.vector_norm(tuned, dim=1, keepdim=True).clamp_min(torch.finfo(base.dtype).tiny)
    applied: Tensor = magnitude.to(base.dtype).reshape(-1, 1) * tuned / norm
    return applied


def _base_weight(pair: LoraPair, dim: int) -> Tensor:
    """The base weight with its output rows first, dequantised if it is stored quantised."""
    weight: Tensor = pair.base_layer.weight.detach()
    if not weight.dtype.is_floating_point:
        from peft.utils.integrations import dequantize_module_weight

        weight = dequantize_module_weight(pair.base_layer)
    return weight if dim == 0 else weight.transpose(0, dim)
