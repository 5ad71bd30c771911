"""What the meter adds up at every step: each held tensor's squared distance to its start, by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from routeguard.drift.frobenius import Kernel, squared_distance, squared_norm
from routeguard.drift.sample import Cell
from routeguard.protect.held import Held
from routeguard.protect.rows import take_rows
from routeguard.routes.collection import Rows


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


def start_squares(terms: Sequence[Term], cells: Sequence[Cell], held: Sequence[Held], starts: StartRows) -> Tensor:
    """‖W₀‖² of each cell, `[cells]`: of everything that makes it up, also where it cannot move and has no start."""
    device = terms[0].start_squared.device if terms else (held[0].parameter.device if held else torch.device("cpu"))
    sums = {cell: torch.zeros((), device=device) for cell in cells}
    for term in terms:
        sums[term.cell] = sums[term.cell] + term.start_squared.to(device)
    for h in held:
        if h.part == "base" and h.name not in starts and h.parameter.dtype.is_floating_point:
            for route in h.routes:
                rows = take_rows(h.parameter.detach(), route.rows, h.dim)
                cell = (route.layer, route.role)
                sums[cell] = sums[cell] + h.share * squared_norm(rows).to(device)
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
