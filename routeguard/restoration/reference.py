"""The starting weights that routing is measured against and put back to: captured, saved beside a run, loaded again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from routeguard.checkpoint.sidecar import (
    METADATA_KEY,
    SCHEMA_VERSION,
    digest_header,
    read_facts,
    refuse_altered,
)
from routeguard.protect.held import Held
from routeguard.protect.rows import take_rows
from routeguard.restoration.meaning import meaning_of
from routeguard.routes.collection import Route, Rows, route_from_json, rows_from_json
from routeguard.routes.in_memory import is_quantised
from routeguard.sharding.processes import from_the_first, is_first_process
from routeguard.sharding.split import is_split
from routeguard.sharding.whole import whole_tensor
from routeguard.storage.durable import written_beside
from routeguard.storage.row_bytes import locate_rows


@dataclass(frozen=True, eq=False)
class Reference:
    """Start values of the held rows of a model.

    Attributes:
        tensors: canonical parameter name to the held rows only, concatenated along `dims[name]`, in their own dtype, on
            the CPU. Names that share storage share one tensor.
        rows: canonical name to `(start, stop)` ranges in the whole parameter, None for all of it.
        dims: canonical name to the dimension that the rows index.
        meaning: facts that give queries and keys their meaning (`restoration.meaning`); empty if unknown.
        origin: where the values come from, for people ("live weights at step 0", a path).
        routes: canonical name to the routes that the parameter carries, as the model had them.
        notes: what was left out or converted, for the report.
        known_digest: the digest, where another process holds the tensors.
    """

    tensors: Mapping[str, Tensor]
    rows: Mapping[str, Rows | None]
    dims: Mapping[str, int]
    meaning: Mapping[str, Any]
    origin: str
    routes: Mapping[str, tuple[Route, ...]]
    notes: tuple[str, ...] = ()
    known_digest: str = ""

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over names, rows, dimensions, shapes, dtypes, bytes: the same for the same values anywhere."""
        if self.known_digest:
            return self.known_digest
        total = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            dtype = str(tensor.dtype).removeprefix("torch.")
            total.update(digest_header(name, self.rows[name], self.dims[name], tuple(tensor.shape), dtype))
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of the start values, shared storage counted once."""
        unique = {id(tensor): tensor.numel() * tensor.element_size() for tensor in self.tensors.values()}
        return sum(unique.values())

    def values(self, name: str, rows: Rows | None, dim: int = 0) -> Tensor:
        """The start values of some rows of a parameter, concatenated along `dim`.

        Raises ValueError when the reference does not hold the parameter, or not all of these rows.
        """
        if name not in self.tensors:
            raise ValueError(f"the reference ({self.origin}) does not hold {name!r}; it holds {_listed(self.tensors)}")
        if self.rows[name] is None and rows is None:
            return self.tensors[name]
        if dim != self.dims[name]:
            raise ValueError(
                f"rows of {name!r} lie along dimension {self.dims[name]} in the reference, asked for {dim}"
            )
        located = locate_rows(self.rows[name], rows, total=self.shape(name)[dim], what=name)
        return take_rows(self.tensors[name], located, dim)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole parameter, of which `tensors[name]` may be only some rows."""
        shape = list(self.tensors[name].shape)
        if self.rows[name] is not None:
            route = self.routes[name][0]  # rows of an adapter's B or magnitude are rows of the routed weight
            shape[self.dims[name]] = route.shape[route.dim]
        return tuple(shape)


def capture_reference(
    model: nn.Module, held: Sequence[Held], *, origin: str = "live weights", gather: bool = False
) -> Reference:
    """A snapshot of the held rows of a live model, adapters included, on the CPU.

    Args:
        model: the model; only its config is read.
        held: from `held_parameters(model, routes)`. Quantised base weights are left out: training cannot move them.
        origin: text for people.
        gather: also take parameters that are split over processes, one at a time. Every process must then call it; the
            first one gets the values, the others a reference without tensors and with the same digest. Default: no.

    Raises:
        ValueError: a parameter has no values here (meta device), or is split over processes without `gather`.
    """
    captured = [piece for piece in held if not is_quantised(piece.parameter)]
    gathers = gather and any(is_split(piece.parameter) for piece in captured)
    if not gathers:
        for piece in captured:
            refuse_unreadable(piece)
    tensors = _snapshot(captured, keep=not gathers or is_first_process())
    left_out = len(held) - len(captured)
    reference = Reference(
        tensors=tensors,
        rows={piece.canonical: piece.rows for piece in captured},
        dims={piece.canonical: piece.dim for piece in captured},
        meaning=meaning_of(model),
        origin=origin,
        routes={piece.canonical: piece.routes for piece in captured},
        notes=(f"{left_out} quantised base weights are not kept: training cannot move them",) if left_out else (),
    )
    if not gathers:
        return reference
    return replace(reference, known_digest=from_the_first(reference.digest if tensors else ""))


def _snapshot(held: Sequence[Held], *, keep: bool) -> dict[str, Tensor]:
    """Canonical name to the held rows, on the CPU; nothing if not to `keep` (the gathering still takes part)."""
    tensors: dict[str, Tensor] = {}
    kept: dict[tuple[Any, ...], Tensor] = {}
    for piece in held:
        parameter = whole_tensor(piece.parameter)
        if not keep:
            continue
        at = id(piece.parameter) if is_split(piece.parameter) else parameter.data_ptr()
        key = (at, parameter.shape, parameter.stride(), parameter.dtype, piece.rows, piece.dim)
        if key not in kept:
            kept[key] = take_rows(parameter, piece.rows, piece.dim).to("cpu", copy=True).contiguous()
        tensors[piece.canonical] = kept[key]
    return tensors


def save_reference(reference: Reference, path: str | os.PathLike[str]) -> None:
    """Write a reference as one safetensors file, atomically (written beside, synced, renamed); makes folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "schema_version": SCHEMA_VERSION,
        "digest": reference.digest,
        "origin": reference.origin,
        "rows": dict(reference.rows),
        "dims": dict(reference.dims),
        "meaning": dict(reference.meaning),
        "routes": {name: [asdict(route) for route in routes] for name, routes in reference.routes.items()},
        "notes": list(reference.notes),
    }
    written: set[int] = set()
    tensors = {}
    for name, tensor in reference.tensors.items():  # the format does not take shared storage
        tensors[name] = tensor.clone() if tensor.data_ptr() in written else tensor.contiguous()
        written.add(tensor.data_ptr())
    with written_beside(path) as beside:
        save_file(tensors, beside, metadata={METADATA_KEY: json.dumps(facts, sort_keys=True)})


def load_reference(path: str | os.PathLike[str]) -> Reference:
    """Read a file that `save_reference` wrote.

    Raises:
        ValueError: not such a file, another schema version, or the content does not match its own digest.
    """
    path = Path(path)
    facts = read_facts(path)
    try:
        with safe_open(path, framework="pt") as stream:
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    reference = Reference(
        tensors=tensors,
        rows={name: rows_from_json(rows) for name, rows in facts["rows"].items()},
        dims=facts["dims"],
        meaning=facts["meaning"],
        origin=facts["origin"],
        routes={name: tuple(route_from_json(route) for route in routes) for name, routes in facts["routes"].items()},
        notes=tuple(facts["notes"]),
    )
    complete = set(tensors) == set(reference.rows) == set(reference.dims) == set(reference.routes)
    refuse_altered(path, reference.digest if complete else "", facts["digest"])
    return reference


def refuse_unreadable(piece: Held) -> None:
    """Raise ValueError when the held rows cannot be read here: split over processes, or beyond an adapter's tensor."""
    refuse_without_local_values(piece.name, piece.parameter)
    size = piece.parameter.shape[piece.dim]
    if piece.rows and piece.rows[-1][1] > size and not is_quantised(piece.parameter):
        raise ValueError(
            f"{piece.name} has {size} rows, fewer than the routed weight that it serves ({piece.rows[-1][1]})"
        )


def refuse_without_local_values(name: str, parameter: Tensor) -> None:
    """Raise ValueError when this process does not hold the whole parameter."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values; load the weights first")
    split = "ZeRO" if hasattr(parameter, "ds_id") else "FSDP2" if hasattr(parameter, "full_tensor") else ""
    if split or (parameter.numel() == 0 and parameter.ndim > 0):
        raise ValueError(
            f"{name} is split over processes ({split or 'no elements here'}); this version copies whole tensors only: "
            "save a full checkpoint, and restore that in a single process"
        )


def _listed(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:6])}{f' … ({len(listed)} tensors)' if len(listed) > 6 else ''}" or "nothing"
