"""`verify_checkpoint`: do the routing rows of a saved checkpoint still equal their start, byte for byte? No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from routeguard.checkpoint.compare import num_differing, rounding_that_explains, why_not_comparable
from routeguard.checkpoint.in_place import refuse_interrupted
from routeguard.checkpoint.start import Start, open_plain, open_start
from routeguard.routes.collection import ROLES, ROUTING_ROLES, Role, Route, Routes
from routeguard.routes.find import find_routes
from routeguard.routes.names import canonical_name
from routeguard.routes.places import with_places
from routeguard.routes.wording import as_printed, first_of
from routeguard.storage.floats import is_exact
from routeguard.storage.folder import is_adapter_folder
from routeguard.storage.header import StoredTensor
from routeguard.storage.hub import local_folder
from routeguard.storage.row_bytes import Slice

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TensorCheck:
    """The rows of one role in one tensor.

    Attributes:
        layer, role, kind: of the route.
        tensor: name on disk.
        num_rows, num_elements: how much was compared.
        num_differing: entries that differ from the start.
        reason: why the rows count as changed although no entry could be compared; "" otherwise.
        note: "same values, other dtype" and the like.
        rounding: if the entries differ, the 16-bit dtype to which the start was rounded, where that explains them all.
    """

    layer: int
    role: str
    kind: str
    tensor: str
    num_rows: int
    num_elements: int
    num_differing: int = 0
    reason: str = ""
    note: str = ""
    rounding: str = ""

    @property
    def ok(self) -> bool:
        return not self.num_differing and not self.reason


@dataclass(frozen=True)
class VerifyReport:
    """What `verify_checkpoint` found. `str()` prints it, `to_dict()` is JSON-serialisable."""

    folder: str
    against: str
    checks: tuple[TensorCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Something was compared, and all of it equals the start."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def mismatches(self) -> tuple[TensorCheck, ...]:
        return tuple(check for check in self.checks if not check.ok)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        layers = sorted({check.layer for check in self.checks})
        rows = sum(check.num_rows for check in self.checks)
        elements = sum(check.num_elements for check in self.checks)
        lines = [
            f"{self.folder} against {self.against}",
            f"compared {rows:,} rows ({elements:,} entries) in {len(self.checks)} places of layers {layers}",
        ]
        for check in self.mismatches:
            share = f"{check.num_differing:,} of {check.num_elements:,} entries differ"
            share += f", all by rounding the start to {check.rounding}" if check.rounding else ""
            lines.append(
                f"CHANGED  layer {check.layer} {check.role} {check.kind}  {check.tensor}: {check.reason or share}"
            )
        noted = [f"{check.tensor}: {check.note}" for check in self.checks if check.note]
        lines += [f"note: {first_of(noted)}"] if noted else []
        lines += [f"note: {note}" for note in self.notes]
        if self.ok:
            return "\n".join([*lines, "OK: every row equals its start"])
        if any(check.rounding for check in self.mismatches):
            lines.append("note: rounding alone means that the model was loaded in 16 bits; training moved no such row")
        lines.append(f"CHANGED: {len(self.mismatches)} of {len(self.checks)}")
        of_adapter = any(".lora_" in check.tensor for check in self.checks)  # whose drift nothing on disk tells
        if not of_adapter and any(check.num_differing and not check.reason for check in self.mismatches):
            lines.append(f"how far: routeguard drift BASE {self.folder}")
        return "\n".join(lines)

    _repr_pretty_ = as_printed


def verify_checkpoint(
    folder: str | PathLike[str],
    against: str | PathLike[str],
    *,
    layers: Iterable[int] | None = None,
    roles: Iterable[Role] | None = None,
    norms: bool = False,
) -> VerifyReport:
    """Compare the routing rows of a checkpoint with those of its start, reading only those rows, in bounded memory.

    Args:
        folder: a checkpoint folder (`config.json`, safetensors, sharded or not), or a PEFT adapter folder.
        against: the starting checkpoint's folder, or what a guarded run kept (its folder, or `reference.safetensors`).
        layers: only these. Default: all that the start covers.
        roles: default query and key; against what a run kept, everything that it held.
        norms: also norm gains. Default: no, unless the run held them.

    Returns:
        A `VerifyReport`; `report.ok` says whether all rows are equal. Equal values in another float dtype count as
        equal, with a note; where the checkpoint's type is narrower, the start is rounded to it first. Rows that are the
        start's rounded to 16 bits, but stored in a wider type (loaded in 16 bits, trained in 32), count as changed and
        are told apart.

    Raises:
        ValueError: not a checkpoint, a quantised one, one that carries an adapter (its rows are not what the model
            applies), nothing in common to compare, or an in-place restore that stopped half way.
    """
    folder, source = Path(folder), local_folder(str(against))
    start = open_start(source)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with a checkpoint or an adapter")
    if source.resolve() == folder.resolve() and not start.is_sidecar:
        raise ValueError(f"{folder} would be compared with itself; give the checkpoint that the tuning started from")
    refuse_interrupted(folder)
    if is_adapter_folder(folder):
        from routeguard.checkpoint.verify_adapter import check_adapter

        checks, notes = check_adapter(folder, start, layers=layers, roles=roles, norms=norms)
    else:
        _, stored = open_plain(folder)
        everything = start.is_sidecar and roles is None
        routes = _routes(
            folder, layers, ROLES if everything else roles or ROUTING_ROLES, norms or everything, everything
        )
        checks, notes = _check_plain(stored, routes, start)
    return VerifyReport(str(folder), start.origin, tuple(checks), tuple(notes))


def check_slice(route: Route, found: Slice, start: Slice, tensor: str) -> TensorCheck:
    """Compare one slice with its start."""
    reason = why_not_comparable(found, start)
    kinds = (found.tensor.dtype, start.tensor.dtype)
    differing = 0 if reason else num_differing(found, start)
    note = ""
    if kinds[0] != kinds[1] and not reason:
        rounded = "" if is_exact(kinds[1], kinds[0]) else " (rounded)"
        note = f"stored as {kinds[0]}, the start as {kinds[1]}{rounded}"
    rounding = rounding_that_explains(found, start) if differing else ""
    return TensorCheck(
        route.layer,
        route.role,
        route.kind,
        tensor,
        route.num_rows,
        found.num_elements,
        differing,
        reason,
        note,
        rounding,
    )


def _routes(folder: Path, layers: Iterable[int] | None, roles: Iterable[Role], norms: bool, shared: bool) -> Routes:
    with (
        warnings.catch_warnings()
    ):  # a pure softmax model is worth a warning when it is guarded, not when it is checked
        warnings.simplefilter("ignore", UserWarning)
        return find_routes(folder, layers=layers, roles=roles, norms=norms, shared=shared)


def _check_plain(
    stored: dict[str, StoredTensor], routes: Sequence[Route], start: Start
) -> tuple[list[TensorCheck], list[str]]:
    checks, left_out = [], []
    for route, place in with_places(routes):
        tensor = stored[canonical_name(route.parameter)]
        begin = start.find(route, place)
        if begin is not None:
            checks.append(check_slice(route, Slice(tensor, route.rows, route.dim), begin, tensor.name))
        elif start.is_sidecar:
            left_out.append(route)
        else:
            reason = "the start has no such rows (another model, or another shape)"
            checks.append(
                TensorCheck(
                    route.layer, route.role, route.kind, tensor.name, route.num_rows, route.num_parameters, 0, reason
                )
            )
    if not checks:
        adapters = sorted(name for name in start.tensors if ".lora_" in name)
        hint = (
            "; it holds the start of adapters, so compare a merged model with the base checkpoint instead"
            if adapters
            else ""
        )
        raise ValueError(
            f"{start.origin} holds none of this checkpoint's {len(routes)} routes (first: {routes[0].parameter}){hint}"
        )
    held = {(check.layer, check.role) for check in checks}
    missing = sorted({(r.layer, r.role) for r in left_out if r.role in ROUTING_ROLES and r.kind == "weight"} - held)
    notes = (
        [f"not held by the run, not compared: {', '.join(f'layer {at} {role}' for at, role in missing)}"]
        if missing
        else []
    )
    return checks, notes
