"""What the meter adds up at every step: each held tensor's squared distance to its start, by rows, or as ΔW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from routeguard.drift.adapters import dora_delta_norm, lora_delta_distance
from routeguard.drift.frobenius import Kernel, squared_distance, squared_norm
from routeguard.protect.held import Held, LoraPair, lora_pairs
from routeguard.protect.rows import put_rows, take_rows
from routeguard.routes.collection import Routes, Rows
from routeguard.routes.names import without_late_wrappers

Cell = tuple[int, str]  # (layer, role)


@dataclass
class Term:
    """One tensor's share of a cell: a function giving ‖difference‖², and the squared norm of the start."""

    cell: Cell
    squared: Callable[[], Tensor]
    start_squared: Tensor


class StartRows:
    """Start values by route, out of the held rows' start: a view where a route's rows lie together, else one copy."""

    def __init__(self, starts: Mapping[str, Tensor]) -> None:
        self._starts = starts
        self._taken: dict[tuple[str, Rows | None], Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def of(self, held: Held, rows: Rows | None) -> Tensor:
        key = (held.name, rows)
        if key not in self._taken:
            self._taken[key] = take_rows(self._starts[held.name], rows_within(rows, held.rows), held.dim)
        return self._taken[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of the starts and of the copies made of them."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*self._starts.values(), *self._taken.values())
        }
        return sum(storages.values())


def base_terms(held: Sequence[Held], starts: StartRows, kernel: Kernel | None) -> list[Term]:
    """Parameters that move themselves: full fine-tuning, or adapters other than LoRA as a whole."""
    terms = []
    for h in held:
        if h.part not in ("base", "adapter") or h.name not in starts:
            continue
        for route in h.routes:
            rows = route.rows if h.part == "base" else h.rows
            start = starts.of(h, rows)
            terms.append(_term((route.layer, route.role), h, start, rows, kernel))
    return terms


def _term(cell: Cell, held: Held, start: Tensor, rows: Rows | None, kernel: Kernel | None) -> Term:
    def squared() -> Tensor:
        distance = squared_distance(held.parameter.detach(), start, rows=rows, dim=held.dim, kernel=kernel)
        return distance if held.share == 1 else held.share * distance

    return Term(cell, squared, held.share * squared_norm(start))


def lora_terms(model: nn.Module, routes: Routes, starts: Mapping[str, Tensor]) -> list[Term]:
    """LoRA and DoRA: ‖ΔW − ΔW₀‖ of the held rows from r × r products, relative to the base weight's rows."""
    names = {id(parameter): without_late_wrappers(name) for name, parameter in model.named_parameters()}
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
            base = _base_weight(pair, route.dim)
            base_squared = squared_norm(take_rows(base, route.rows))
            if m0 is not None and not b0.any() and pair.base_layer.weight.dtype.is_floating_point:
                terms.append(_dora_term(cell, pair, base, take_rows(m0, within), route.rows, base_squared))
            else:
                terms.append(_lora_term(cell, pair, a0, take_rows(b0, within), route.rows, base_squared))
    return terms


def _lora_term(cell: Cell, pair: LoraPair, a0: Tensor, b0: Tensor, rows: Rows | None, base_squared: Tensor) -> Term:
    def squared() -> Tensor:
        b = take_rows(pair.b.detach(), rows)
        return lora_delta_distance(pair.a.detach(), b, pair.scale, a0, b0, pair.scale).square()

    return Term(cell, squared, base_squared)


def _dora_term(cell: Cell, pair: LoraPair, base: Tensor, m0: Tensor, rows: Rows | None, base_squared: Tensor) -> Term:
    magnitude = pair.magnitude
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

    return Term(cell, squared, base_squared)


def _base_weight(pair: LoraPair, dim: int) -> Tensor:
    """The base weight with its output rows first, dequantised if it is stored quantised."""
    weight: Tensor = pair.base_layer.weight.detach()
    if not weight.dtype.is_floating_point:
        from peft.utils.integrations import dequantize_module_weight

        weight = dequantize_module_weight(pair.base_layer)
    return weight if dim == 0 else weight.transpose(0, dim)


def start_squares(terms: Sequence[Term], cells: Sequence[Cell], held: Sequence[Held]) -> Tensor:
    """‖W₀‖² of each cell, `[cells]`."""
    device = terms[0].start_squared.device if terms else (held[0].parameter.device if held else torch.device("cpu"))
    sums = {cell: torch.zeros((), device=device) for cell in cells}
    for term in terms:
        sums[term.cell] = sums[term.cell] + term.start_squared.to(device)
    return torch.stack(list(sums.values()))


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
