"""Measure drift of a model that is training: cheap factor drift at every step, the logit form at log steps.

Everything stays on the device until `read`: no host synchronisation between log steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from routeguard.drift.adapter_terms import lora_terms
from routeguard.drift.forms import routing_forms
from routeguard.drift.frobenius import compiled_kernel, relative
from routeguard.drift.routing_form import compiled_pair_kernel
from routeguard.drift.sample import Cell, DriftSample
from routeguard.drift.terms import StartRows, base_terms, start_squares
from routeguard.protect.held import Held, held_parameters
from routeguard.protect.rows import take_rows
from routeguard.routes.collection import Routes
from routeguard.routes.in_memory import is_quantised
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.split import shards_of

COMPILE_FROM_ELEMENTS = 1 << 23  # held scalars from which compiled kernels pay


class DriftMeter:
    """Drift of the held parameters from their start.

    Args:
        model: the model in training.
        routes: what is covered; gives layers, roles and geometry.
        held: from `held_parameters(model, routes)`.
        starts: for each held name the start of its held rows, on the parameter's device (kept, not copied, where a
            route covers all of them). What has no start is taken for unmoved, and costs nothing.
        total: sums a tensor over all processes, where `held` are shards; called once now and once in each `read`. The
            logit form is then not measured. None (default): everything is here.
    """

    def __init__(
        self,
        model: nn.Module,
        routes: Routes,
        held: Sequence[Held],
        starts: Mapping[str, Tensor],
        *,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.routes = routes
        rows = StartRows(starts)
        compiles = _large(held, starts)
        device = held[0].parameter.device.type if held else "cpu"
        self._terms = [
            *base_terms(held, rows, compiled_kernel() if compiles and device == "cpu" else None),
            *(lora_terms(model, routes, starts) if total is None else ()),
        ]
        self.cells: tuple[Cell, ...] = tuple(dict.fromkeys((route.layer, route.role) for route in routes))
        self._total = total
        squares = start_squares(self._terms, self.cells, held, rows)
        self._norms = (squares if total is None else total(squares)).sqrt()
        self._steps: list[int] = []
        self._pending: list[Tensor] = []
        kernel = compiled_pair_kernel(device) if compiles else None
        if total is None:
            self._forms, self.obstacles = routing_forms(routes, held, rows, kernel)
        else:
            self._forms = {}
            self.obstacles = {layer.layer: "queries and keys are split over processes" for layer in routes.attention}
        self.start_bytes = rows.num_bytes

    @torch.no_grad()
    def measure(self, step: int) -> None:
        """Queue the factor drift of this step, on the device."""
        self._steps.append(step)
        self._pending.append(self._squares())

    @torch.no_grad()
    def read(self, *, routing: bool = True) -> list[DriftSample]:
        """Bring the queued steps to the host, and empty the queue. The last one carries the logit form if asked for."""
        if not self._pending:
            return []
        squares = torch.stack(self._pending)
        distances = (squares if self._total is None else self._total(squares)).sqrt()
        table = relative(distances, self._norms).tolist()
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

    def _squares(self) -> Tensor:
        sums: dict[Cell, Tensor] = {}
        for term in self._terms:
            squared = term.squared()
            sums[term.cell] = sums[term.cell] + squared if term.cell in sums else squared
        zero = torch.zeros((), device=self._norms.device)
        return torch.stack([sums.get(cell, zero).to(self._norms.device, torch.float32) for cell in self.cells])


def _large(held: Sequence[Held], starts: Mapping[str, Tensor]) -> bool:
    """Compiling takes seconds, which a long run over large tensors wins back and a small model does not."""
    return sum(h.num_elements for h in held if h.part == "base" and h.name in starts) >= COMPILE_FROM_ELEMENTS


def track(model: nn.Module, routes: Routes) -> DriftMeter:
    """`Track` for a plain loop: measure drift from the model's present values.

    Call `meter.measure(step)` after each optimizer step and `meter.read()` when you log. It changes nothing and costs
    one copy of the routes, or of the adapters on them. What `freeze` holds is measured like the rest: it reads zero as
    long as nothing else writes to it. Where parameters are split over processes (FSDP2, tensor parallelism), all of
    them must call it and `read`, which adds up over them once.

    Args:
        model: on its final device and in its final dtype.
        routes: from `find_routes(model)`.

    Raises:
        ValueError: all of the routes are stored quantised and no adapter is on them, so there is nothing to measure.
    """
    whole = held_parameters(model, routes)
    shards = shards_of(whole)
    held: Sequence[Held] = shards or whole
    measured = [h for h in held if not is_quantised(h.parameter)]
    if not measured:
        raise ValueError(
            f"all {len(held)} routing tensors are stored quantised and no adapter is on them: they cannot move, and "
            "their drift is not measured"
        )
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in measured}
    return DriftMeter(model, routes, held, starts, total=None if shards is None else sum_over_processes)
