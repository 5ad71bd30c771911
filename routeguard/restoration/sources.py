"""The things that can serve as a reference, behind one face: a model, a state dict, a checkpoint, a sidecar."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.checkpoint.sidecar import beside_kept, sidecar_in
from routeguard.checkpoint.tensors import read_tensor
from routeguard.protect.rows import take_rows
from routeguard.restoration.meaning import meaning_of, meaning_of_config
from routeguard.restoration.reference import Reference, load_reference, refuse_without_local_values
from routeguard.routes.collection import ROLES, Route, Rows
from routeguard.routes.in_memory import applied_parameters, copied_for, is_quantised, model_config, model_tensors
from routeguard.routes.layouts import TensorInfo
from routeguard.routes.names import canonical_name
from routeguard.routes.resolve import resolve
from routeguard.storage.folder import (
    adapter_file,
    checkpoint_config,
    holds_model,
    is_adapter_folder,
    stored_checkpoint,
    stored_tensors,
)
from routeguard.storage.header import StoredTensor
from routeguard.storage.row_bytes import Slice

ReferenceSource = Reference | nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
_EVERYTHING: dict[str, Any] = {"roles": ROLES, "norms": True, "shared": True}


def _no_routes() -> Sequence[Route]:
    return ()


@dataclass(frozen=True, eq=False)
class Source:
    """What a reference can be read from.

    Attributes:
        origin: text for people.
        shapes: canonical name to shape of every tensor that can be read.
        read: `(canonical name, rows, dim)` to the rows, concatenated along `dim`, copied to the CPU.
        routes: the source's own routes of every role and kind, with canonical names; read only when names do not match.
        meaning: facts of `restoration.meaning`, empty if unknown.
        notes: for the report.
    """

    origin: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Rows | None, int], Tensor]
    routes: Callable[[], Sequence[Route]] = _no_routes
    meaning: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def as_source(source: ReferenceSource, model: nn.Module) -> Source:
    """Understand what the user gave as a reference.

    Args:
        source: a `Reference`, a model, a state dict, a checkpoint or adapter folder, a safetensors file, or what a
            guarded run left: its `reference.safetensors`, the folder `routeguard/` around it, or the run's folder where
            that holds no model of its own (else those weights are taken, with a note).
        model: the tuned model; its config explains a state dict whose names differ.

    Raises ValueError for anything else, a path that does not exist, and pickled weights.
    """
    if isinstance(source, Reference):
        return _from_reference(source)
    if isinstance(source, nn.Module):
        return _from_module(source)
    if isinstance(source, Mapping):
        return _from_state_dict(source, model)
    if isinstance(source, (str, os.PathLike)):
        return _from_path(Path(source), model)
    raise ValueError(
        f"reference is a {type(source).__name__}; give a model, a state dict, a checkpoint folder, a safetensors file, "
        "or the reference that a guarded run kept"
    )


def _from_reference(reference: Reference) -> Source:
    return Source(
        origin=reference.origin,
        shapes={name: reference.shape(name) for name in reference.tensors},
        read=reference.values,
        routes=lambda: [
            route for name in reference.routes for route in _named(reference.routes[name]) if route.parameter == name
        ],
        meaning=reference.meaning,
        notes=reference.notes,
    )


def _from_module(module: nn.Module) -> Source:
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in applied_parameters(module):
        if not is_quantised(parameter):
            parameters.setdefault(canonical_name(name), parameter)

    def read(name: str, rows: Rows | None, dim: int) -> Tensor:
        refuse_without_local_values(name, parameters[name])
        return take_rows(parameters[name].detach(), rows, dim).to("cpu", copy=True)

    return Source(
        origin=f"a {type(module).__name__} in memory",
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        read=read,
        routes=lambda: _named(resolve(model_config(module), model_tensors(module), **_EVERYTHING)),
        meaning=meaning_of(module),
    )


def _from_state_dict(state: Mapping[str, Tensor], model: nn.Module) -> Source:
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if not state or wrong:
        found = f"holds {type(state[wrong[0]]).__name__} under {wrong[0]!r}" if wrong else "is empty"
        raise ValueError(f"the reference {found}; a state dict maps parameter names to tensors")
    copies: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if tensor.dtype.is_floating_point:
            copies.setdefault(canonical_name(name), {}).setdefault(copied_for(name), tensor)
    used = {canonical_name(name): copied_for(name) for name, _ in applied_parameters(model)}
    chosen = {name: _copies_in_use(found, used.get(name, "")) for name, found in copies.items()}
    tensors = {name: copies[name][adapters[0]] for name, adapters in chosen.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(name: str, rows: Rows | None, dim: int) -> Tensor:
        if len(chosen[name]) > 1:
            raise ValueError(
                f"the state dict holds a copy of {name} for each of the adapters {', '.join(chosen[name])} "
                "(modules_to_save), and the model has none of them active: which one is its start? Keep only that one "
                "in the state dict, or give the model that it is from, with its adapter active"
            )
        refuse_without_local_values(name, tensors[name])
        return take_rows(tensors[name].detach(), rows, dim).to("cpu", copy=True)

    return Source("a state dict", shapes, read, lambda: _routes_under(model, shapes))


def _copies_in_use(found: Mapping[str, Tensor], used: str) -> list[str]:
    """The adapters whose copy of a tensor can be the start ("": no copy): the model's, else all that there are."""
    adapters = [adapter for adapter in found if adapter]
    return [used] if used in adapters else adapters or [""]


def _from_path(path: Path, model: nn.Module) -> Source:
    if not path.exists():
        raise ValueError(f"reference {str(path)!r} does not exist (paths only: nothing is downloaded)")
    sidecar = sidecar_in(path)
    if sidecar is not None and not (path.is_dir() and holds_model(path)):
        return _from_reference(load_reference(sidecar))
    if path.is_dir():
        if is_adapter_folder(path):
            return _from_files(path, stored_tensors([adapter_file(path)]), model)
        found = _from_checkpoint(path)
        return found if sidecar is None else replace(found, notes=(*found.notes, beside_kept(path, sidecar)))
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is no safetensors file, and other formats (pickles) are not opened; load it yourself and pass the "
            "state dict"
        )
    return _from_files(path, stored_tensors([path]), model)


def _from_checkpoint(folder: Path) -> Source:
    raw = checkpoint_config(folder)
    stored = stored_checkpoint(folder)
    routes = resolve(raw, stored, **_EVERYTHING)
    config = complete_config(folder) or raw
    return Source(
        origin=f"the checkpoint {folder}",
        shapes={name: tensor.shape for name, tensor in stored.items()},
        read=lambda name, rows, dim: _read_stored(stored[name], rows, dim),
        routes=lambda: _named(routes),
        meaning=meaning_of_config(config, routes),
    )


def _from_files(path: Path, stored: Mapping[str, StoredTensor], model: nn.Module) -> Source:
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return Source(
        origin=f"the file {path}" if path.is_file() else f"the adapter {path}",
        shapes=shapes,
        read=lambda name, rows, dim: _read_stored(stored[name], rows, dim),
        routes=lambda: _routes_under(model, shapes),
    )


def complete_config(folder: Path) -> dict[str, Any] | None:
    """The config with the defaults that `config.json` may leave out, or None for remote code and unknown types."""
    from transformers import AutoConfig

    holder = nn.Module()
    try:
        holder.config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return model_config(holder)
    except Exception:  # whatever the config of an unknown, newer or damaged kind makes it raise
        return None


def _read_stored(tensor: StoredTensor, rows: Rows | None, dim: int) -> Tensor:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"{tensor.name} in {tensor.file} is stored as {tensor.dtype}; a reference needs floating-point weights"
        )
    return read_tensor(Slice(tensor, rows, dim))


def _routes_under(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Route]:
    """Routes of bare tensors, read with the tuned model's config."""
    tensors = {name: TensorInfo(name, shape) for name, shape in shapes.items()}
    return _named(resolve(model_config(model), tensors, **_EVERYTHING))


def _named(routes: Sequence[Route]) -> list[Route]:
    return [replace(route, parameter=canonical_name(route.parameter)) for route in routes]
