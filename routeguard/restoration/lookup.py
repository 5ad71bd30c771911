"""`open_reference`: find the start value of every held row in whatever serves as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held, peft_configs
from routeguard.protect.lora_modules import active_adapters
from routeguard.protect.rows import put_rows, take_rows
from routeguard.restoration.adapters import adapted_modules
from routeguard.restoration.reference import Reference
from routeguard.restoration.sources import ReferenceSource, Source, as_source
from routeguard.routes.collection import Route, Rows, merge_rows
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.names import canonical_name
from routeguard.routes.places import Place, fit_row_for_row, with_places
from routeguard.sharding.whole import whole_shape


def open_reference(source: ReferenceSource, model: nn.Module, held: Sequence[Held]) -> Reference:
    """Read the start values of the held rows, under the canonical names of `model`.

    A tensor is matched by canonical name and shape; failing that, by layer, role and kind, row for row (checkpoints
    store some models under other names, or fused where the model is split). For an adapter the reference holds its
    initial tensors if the source has them, else the base weight that it sits on.

    Args:
        source: a model, a state dict, a checkpoint folder, a safetensors file, a `Reference`, or the sidecar of a
            guarded run (the file, the folder `routeguard/`, or the run's folder where that holds no model of its
            own). Only the held rows are read.
        model: the model that the values are for.
        held: from `held_parameters(model, routes)`.

    Returns:
        A `Reference` with the source's dtypes, its meaning, and notes on what was matched by place.

    Raises:
        ValueError: tensors are missing or have another shape (another model), with what was asked and found; the source
            holds one adapter, and the model has several active.
    """
    opened = as_source(source, model)
    lookup = _Lookup(opened, [route for piece in held for route in piece.routes], active_adapters(model))
    for group in adapted_modules(held).values():
        lookup.adapter(group, list(peft_configs(model)))
    for piece in held:
        if piece.part == "base" and not is_quantised(piece.parameter):
            lookup.base(piece.canonical, whole_shape(piece.parameter), piece.rows, piece.dim, piece.routes)
    return lookup.finish()


class _Lookup:
    """Collects start values one tensor at a time, and everything that is missing."""

    def __init__(self, source: Source, routes: Sequence[Route], active: set[str]) -> None:
        self.source = source
        self.active = active
        self.places = dict(with_places(dict.fromkeys(map(_canonical, routes))))
        self.tensors: dict[str, Tensor] = {}
        self.rows: dict[str, Rows | None] = {}
        self.dims: dict[str, int] = {}
        self.routes: dict[str, tuple[Route, ...]] = {}
        self.with_adapter: set[str] = set()  # base weights whose adapters were found too
        self.missing: list[str] = []
        self.by_place: list[str] = []
        self._source_places: dict[Place, Route] | None = None
        self._unreadable = ""

    def base(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Rows | None,
        dim: int,
        routes: tuple[Route, ...],
        *,
        optional: bool = False,
    ) -> bool:
        """Find the routed parameter `name`; True if found. A missing one is recorded unless it is optional."""
        if name in self.tensors:
            return True
        adapters = self._adapters_on(name)
        if adapters and name not in self.with_adapter:
            raise ValueError(
                f"the reference ({self.source.origin}) carries an adapter on {name!r} ({', '.join(adapters[:2])}), so "
                "its base weight alone is not its start; merge it first (merge_and_unload), or give the base checkpoint"
            )
        if self.source.shapes.get(name) == shape:
            values: Tensor | None = self.source.read(name, rows, dim)
        else:
            values = self._assembled(name, shape, rows, dim, routes)
        if values is None:
            if not optional:
                self.missing.append(f"{name} {list(shape)}{self._nearest(name)}")
            return False
        self._keep(name, values, rows, dim, routes)
        return True

    def adapter(self, group: Sequence[Held], adapters: Sequence[str]) -> None:
        """Find the initial tensors of one module's adapters, or else the base weight below."""
        found = {piece: self._adapter_name(piece, adapters) for piece in group}
        present = [piece for piece, name in found.items() if name is not None]
        for piece, name in found.items():
            other = next((p for p in present if p is not piece and found[p] == name), None)
            if other is not None and {piece.adapter, other.adapter} <= self.active:
                raise ValueError(
                    f"the reference ({self.source.origin}) holds one adapter ({name}), and the model has several "
                    f"active ({', '.join(sorted(self.active))}): it cannot be the start of each. Make one of them "
                    "active (model.set_adapter(name)), or give a reference that holds all of them"
                )
        if len(present) == len(group):
            self.with_adapter.add(_canonical(group[0].routes[0]).parameter)
            for piece, name in found.items():
                self._keep(
                    piece.canonical,
                    self.source.read(name or "", piece.rows, piece.dim),
                    piece.rows,
                    piece.dim,
                    piece.routes,
                )
            return
        if present:
            absent = [piece for piece, name in found.items() if name is None]
            self.missing += [f"{piece.canonical} {list(whole_shape(piece.parameter))}" for piece in absent]
            return
        route = _canonical(group[0].routes[0])
        rows = next((piece.rows for piece in group if piece.part != "lora_A"), None)
        # Quantised bases have a logical shape of their own; the reference may be absent for a sidecar of another run.
        if not self.base(route.parameter, route.shape, rows, route.dim, group[0].routes, optional=True):
            base = f"{route.parameter} {list(route.shape)}{self._nearest(route.parameter)}"
            shape = list(whole_shape(group[0].parameter))
            self.missing.append(f"{group[0].canonical} {shape} (nor the base weight {base})")

    def finish(self) -> Reference:
        if self.missing:
            shown = "\n  ".join(self.missing[:8])
            more = f"\n  … and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
            raise ValueError(
                f"the reference ({self.source.origin}, {len(self.source.shapes)} tensors) is not from this model: it "
                f"lacks {len(self.missing)} of the tensors asked for:\n  {shown}{more}{self._unreadable}\n"
                "Give the checkpoint (or the model) that the tuning started from"
            )
        notes = list(self.source.notes)
        if self.by_place:
            notes.append(
                f"{len(self.by_place)} tensors matched by layer and role, not by name (first: {self.by_place[0]})"
            )
        return Reference(
            self.tensors, self.rows, self.dims, self.source.meaning, self.source.origin, self.routes, tuple(notes)
        )

    def _keep(self, name: str, values: Tensor, rows: Rows | None, dim: int, routes: tuple[Route, ...]) -> None:
        self.tensors[name] = values
        self.rows[name], self.dims[name], self.routes[name] = rows, dim, routes

    def _assembled(
        self, name: str, shape: tuple[int, ...], rows: Rows | None, dim: int, routes: tuple[Route, ...]
    ) -> Tensor | None:
        """The rows put together from the source's routes in the same places; None if one of them is not there."""
        pieces = []
        for route in routes:
            match = self._at(route)
            if match is None or not fit_row_for_row(match, route) or match.dim != route.dim:
                return None
            pieces.append((route, match))
        if merge_rows([pair for route in routes for pair in route.rows or ((0, route.shape[route.dim]),)]) != (
            rows or ((0, shape[dim]),)
        ):
            return None
        whole: Tensor | None = None
        for route, match in pieces:
            values = self.source.read(match.parameter, match.rows, match.dim)
            whole = torch.empty(shape, dtype=values.dtype) if whole is None else whole
            put_rows(whole, route.rows, values, route.dim)
        if whole is None:
            return None
        self.by_place.append(f"{name} from {', '.join(dict.fromkeys(match.parameter for _, match in pieces))}")
        return take_rows(whole, rows, dim).clone()

    def _at(self, route: Route) -> Route | None:
        if self._source_places is None:
            try:
                self._source_places = {place: route for route, place in with_places(self.source.routes())}
            except ValueError as error:
                self._source_places = {}
                self._unreadable = f"\nIts routes could not be read either: {error}"
        return self._source_places.get(self.places[_canonical(route)])

    def _adapters_on(self, name: str) -> list[str]:
        """Tensors of the source that hang below the module of a routed weight."""
        module, _, local = name.rpartition(".")
        if local != "weight":
            return []
        return [
            other
            for other in self.source.shapes
            if other.startswith(f"{module}.") and other.count(".") > name.count(".")
        ]

    def _adapter_name(self, piece: Held, adapters: Sequence[str]) -> str | None:
        """The source's name of an adapter tensor: as in the model, or as adapter files spell it."""
        shape = whole_shape(piece.parameter)
        for candidate in _adapter_spellings(piece.canonical, adapters):
            if self.source.shapes.get(candidate) == shape:
                return candidate
        return None

    def _nearest(self, name: str) -> str:
        if name in self.source.shapes:
            return f" (there it has shape {list(self.source.shapes[name])})"
        close = get_close_matches(name, self.source.shapes, n=1)
        return f" (closest there: {close[0]} {list(self.source.shapes[close[0]])})" if close else ""


def _adapter_spellings(name: str, adapters: Sequence[str]) -> list[str]:
    """`…lora_B.default.weight` and, as adapter files have it, `…lora_B.weight` (magnitudes: no `.weight` either)."""
    spellings = [name]
    for adapter in adapters:
        head, found, tail = name.rpartition(f".{adapter}.")
        if found:
            spellings += [f"{head}.{tail}", *([head] if tail == "weight" else [])]
        elif name.endswith(f".{adapter}"):
            spellings.append(name.removesuffix(f".{adapter}"))
    return spellings


def _canonical(route: Route) -> Route:
    return replace(route, parameter=canonical_name(route.parameter))
