"""Measure drift of a model that is training: cheap factor drift at every step, the logit form at log steps.

Everything stays on the device until `read`: no host synchronisation between log steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from routeguard.drift.adapters import dora_delta_norm, lora_delta_distance
from routeguard.drift.frobenius import Kernel, compiled_kernel, squared_distance, squared_norm
from routeguard.drift.routing_form import RoutingReference, prepare, routing_drift
from routeguard.protect.held import Held, LoraPair, lora_pairs
from routeguard.protect.rows import put_rows, take_rows
from routeguard.routes.collection import AttentionLayer, Route, Routes, Rows

Cell = tuple[int, str]  # (layer, role)
COMPILE_FROM_ELEMENTS = 1 << 23  # held scalars from which a compiled distance pays


@dataclass(frozen=True)
class DriftSample:
    """Drift at one step. `factors` maps (layer, role) to ‖W − W₀‖ / ‖W₀‖ over that role's tensors.

    `routing` maps a layer to the relative drift of its logit form, one number for each query head; empty between log
    steps and for layers where the weights' product is not the logit.
    """

    step: int
    factors: Mapping[Cell, float]
    routing: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def of_role(self, role: str) -> float | None:
        """Mean over layers, or None if no tensor of this role is measured."""
        values = [value for (_, name), value in self.factors.items() if name == role]
        return sum(values) / len(values) if values else None


@dataclass
class _Term:
    """One tensor's share of a cell: a function giving ‖difference‖² and the squared norm of the start."""

    cell: Cell
    squared: Callable[[], Tensor]
    start_squared: Tensor


class DriftMeter:
    """Drift of the held parameters from their start.

    Args:
        model: the model in training.
        routes: what is covered; gives layers, roles and geometry.
        held: from `held_parameters(model, routes)`; those that cannot move are measured as zero and cost nothing.
        starts: for each held name the start of its held rows, on the parameter's device (kept, not copied, where a
            route covers all of them).
    """

    def __init__(self, model: nn.Module, routes: Routes, held: Sequence[Held], starts: Mapping[str, Tensor]) -> None:
        self.routes = routes
        self._terms = [*_base_terms(held, starts, _kernel_for(held, starts)), *_lora_terms(model, routes, starts)]
        self.cells: tuple[Cell, ...] = tuple(dict.fromkeys((route.layer, route.role) for route in routes))
        self._norms = _start_norms(self._terms, self.cells, held)
        self._steps: list[int] = []
        self._pending: list[Tensor] = []
        self._forms, self.obstacles = _routing_forms(routes, held, starts)

    @torch.no_grad()
    def measure(self, step: int) -> None:
        """Queue the factor drift of this step, on the device."""
        self._steps.append(step)
        self._pending.append(self._factors())

    @torch.no_grad()
    def read(self, *, routing: bool = True) -> list[DriftSample]:
        """Bring the queued steps to the host, and empty the queue. The last one carries the logit form if asked for."""
        if not self._pending:
            return []
        table = torch.stack(self._pending).tolist()
        forms = {layer: tuple(form().tolist()) for layer, form in self._forms.items()} if routing else {}
        samples = [
            DriftSample(step, dict(zip(self.cells, row, strict=True)), forms if at == len(table) - 1 else {})
            for at, (step, row) in enumerate(zip(self._steps, table, strict=True))
        ]
        self._steps.clear()
        self._pending.clear()
        return samples

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def _factors(self) -> Tensor:
        sums: dict[Cell, Tensor] = {}
        for term in self._terms:
            squared = term.squared()
            sums[term.cell] = sums[term.cell] + squared if term.cell in sums else squared
        zero = torch.zeros((), device=self._norms.device)
        squares = torch.stack([sums.get(cell, zero).to(self._norms.device, torch.float32) for cell in self.cells])
        return squares.sqrt() / self._norms


def _kernel_for(held: Sequence[Held], starts: Mapping[str, Tensor]) -> Kernel | None:
    """Compiling takes seconds, which a long run over large tensors wins back and a small model does not."""
    total = sum(h.num_elements for h in held if h.part == "base" and h.name in starts)
    return compiled_kernel() if total >= COMPILE_FROM_ELEMENTS else None


def _base_terms(held: Sequence[Held], starts: Mapping[str, Tensor], kernel: Kernel | None) -> list[_Term]:
    terms = []
    for h in held:
        if h.part not in ("base", "adapter") or h.name not in starts:
            continue
        for route in h.routes:
            rows = route.rows if h.part == "base" else h.rows
            start = take_rows(starts[h.name], rows_within(rows, h.rows), h.dim)
            terms.append(_term((route.layer, route.role), h.parameter, start, rows, h.dim, kernel))
    return terms


def _term(cell: Cell, parameter: Tensor, start: Tensor, rows: Rows | None, dim: int, kernel: Kernel | None) -> _Term:
    return _Term(
        cell,
        lambda: squared_distance(parameter.detach(), start, rows=rows, dim=dim, kernel=kernel),
        squared_norm(start),
    )


def _lora_terms(model: nn.Module, routes: Routes, starts: Mapping[str, Tensor]) -> list[_Term]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    terms = []
    for pair in lora_pairs(model, routes):
        a0, b0 = starts.get(names[id(pair.a)]), starts.get(names[id(pair.b)])
        if b0 is None:
            continue
        a0 = pair.a.detach().clone() if a0 is None else a0
        m0 = None if pair.magnitude is None else starts.get(names[id(pair.magnitude)])
        for route in pair.routes:
            within = rows_within(route.rows, pair.rows)
            cell = (route.layer, route.role)
            base_squared = _base_norm_squared(pair, route.rows)
            if m0 is not None and pair.zero_start and pair.base_layer.weight.dtype.is_floating_point:
                terms.append(_dora_term(cell, pair, take_rows(m0, within), route.rows, base_squared))
            else:
                terms.append(_lora_term(cell, pair, a0, take_rows(b0, within), route.rows, base_squared))
    return terms


def _lora_term(cell: Cell, pair: LoraPair, a0: Tensor, b0: Tensor, rows: Rows | None, base_squared: Tensor) -> _Term:
    def squared() -> Tensor:
        b = take_rows(pair.b.detach(), rows)
        return lora_delta_distance(pair.a.detach(), b, pair.scale, a0, b0, pair.scale).square()

    return _Term(cell, squared, base_squared)


def _dora_term(cell: Cell, pair: LoraPair, m0: Tensor, rows: Rows | None, base_squared: Tensor) -> _Term:
    magnitude, base = pair.magnitude, pair.base_layer.weight.detach()
    assert magnitude is not None
    full = m0 if rows is None else torch.zeros_like(magnitude.detach())
    if rows is not None:
        put_rows(full, rows, m0)

    def squared() -> Tensor:
        return dora_delta_norm(
            base,
            pair.a.detach(),
            pair.b.detach(),
            pair.scale,
            magnitude.detach(),
            start_magnitude=full,
            rows=rows,
        ).square()

    return _Term(cell, squared, base_squared)


def _base_norm_squared(pair: LoraPair, rows: Rows | None) -> Tensor:
    weight: Tensor = pair.base_layer.weight.detach()
    if not weight.dtype.is_floating_point:
        from peft.utils.integrations import dequantize_module_weight

        weight = dequantize_module_weight(pair.base_layer)
    return squared_norm(take_rows(weight, rows))


def _start_norms(terms: Sequence[_Term], cells: Sequence[Cell], held: Sequence[Held]) -> Tensor:
    device = terms[0].start_squared.device if terms else (held[0].parameter.device if held else torch.device("cpu"))
    sums = {cell: torch.zeros((), device=device) for cell in cells}
    for term in terms:
        sums[term.cell] = sums[term.cell] + term.start_squared.to(device)
    # A zero start (a zero-initialised bias alone) has no relative drift: report the absolute one.
    return torch.stack([torch.where(s > 0, s.sqrt(), torch.ones_like(s)) for s in sums.values()])


def _routing_forms(
    routes: Routes, held: Sequence[Held], starts: Mapping[str, Tensor]
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
        forms[layer] = _form(geometry, query, key, mine, by_name, starts)
    return forms, obstacles


def _form(
    geometry: AttentionLayer,
    query: Route,
    key: Route,
    routes: Sequence[Route],
    held: Mapping[str, Held],
    starts: Mapping[str, Tensor],
) -> Callable[[], Tensor]:
    biases = [next((r for r in routes if r.kind == "bias" and r.role == role), None) for role in ("query", "key")]

    def start_of(route: Route) -> Tensor:
        h = held[route.parameter]
        return _rows_first(take_rows(starts[h.name], rows_within(route.rows, h.rows), route.dim), route)

    def now(route: Route) -> Tensor:
        return _rows_first(take_rows(held[route.parameter].parameter.detach(), route.rows, route.dim), route)

    with_bias = all(b is not None and b.parameter in held and b.parameter in starts for b in biases)
    start_biases = [start_of(b) if with_bias and b is not None else None for b in biases]
    reference: RoutingReference = prepare(
        start_of(query), start_of(key), geometry, query_bias=start_biases[0], key_bias=start_biases[1]
    )

    def form() -> Tensor:
        current = [now(b) if with_bias and b is not None else None for b in biases]
        return routing_drift(now(query), now(key), reference, query_bias=current[0], key_bias=current[1])

    return form


def _rows_first(tensor: Tensor, route: Route) -> Tensor:
    return tensor if route.dim == 0 else tensor.transpose(0, route.dim)


def _weight(routes: Sequence[Route], role: str) -> Route | None:
    found = [r for r in routes if r.role == role and r.kind == "weight"]
    return found[0] if len(found) == 1 else None


def rows_within(rows: Rows | None, held: Rows | None) -> Rows | None:
    """Where `rows` of a parameter lie in the concatenation of its `held` rows; None if they are all of it."""
    if rows == held:
        return None
    if held is None:
        return rows
    assert rows is not None
    found: list[tuple[int, int]] = []
    offset = 0
    for start, stop in held:
        for first, last in rows:
            if first >= start and last <= stop:
                found.append((offset + first - start, offset + last - start))
        offset += stop - start
    return tuple(found)
