"""The start that a saved checkpoint is compared with: another checkpoint, or what a guarded run kept. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from routeguard.checkpoint.sidecar import (
    SIDECAR_FOLDER,
    beside_kept,
    digest_on_disk,
    read_facts,
    refuse_altered,
    sidecar_in,
)
from routeguard.protect.modes import Freeze
from routeguard.restoration.meaning import meaning_of_config
from routeguard.routes.collection import ROLES, Route, Routes, Rows, route_from_json, rows_from_json
from routeguard.routes.config import text_config
from routeguard.routes.names import canonical_name
from routeguard.routes.places import Place, fit_row_for_row, with_places
from routeguard.routes.resolve import resolve
from routeguard.storage.folder import (
    checkpoint_config,
    holds_model,
    quantisation_of,
    read_json,
    stored_checkpoint,
    stored_tensors,
)
from routeguard.storage.header import StoredTensor, read_header
from routeguard.storage.row_bytes import Slice, locate_rows
from routeguard.training.run_state import STATE_FILE, WHOLE_START_DIGEST

MAX_LAYERS = 100_000


@dataclass(frozen=True)
class Start:
    """Start values on disk.

    Attributes:
        origin: text for people.
        tensors: canonical name to where it lies.
        kept_rows: for a sidecar, canonical name to the rows that it keeps; absent names are whole.
        routes: the routes that the tensors carry, canonical names, all roles and kinds.
        is_sidecar: only what a run held is there, under the names of the model in memory, adapters included.
        meaning: facts of `restoration.meaning`.
        notes: for the report.
        folder: with the config of its model; None for a sidecar.
    """

    origin: str
    tensors: Mapping[str, StoredTensor]
    kept_rows: Mapping[str, Rows | None]
    routes: Sequence[Route]
    is_sidecar: bool
    meaning: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    def find(self, route: Route, place: Place) -> Slice | None:
        """The start of a route: by name and shape, else by place; None if it is not there."""
        name = canonical_name(route.parameter)
        match = next((r for r in self.routes if r.parameter == name and r.shape == route.shape), None)
        rows, dim = route.rows, route.dim
        if match is None:
            match = self._places.get(place)
            if match is None or not fit_row_for_row(match, route):
                return None
            name, rows, dim = match.parameter, match.rows, match.dim
        if name not in self.tensors or dim != route.dim:
            return None
        try:
            located = locate_rows(self.kept_rows.get(name), rows, total=match.shape[dim], what=name)
        except ValueError:
            return None
        return Slice(self.tensors[name], located, dim)

    @cached_property
    def _places(self) -> dict[Place, Route]:
        return {place: route for route, place in with_places(self.routes)}


def open_start(path: Path) -> Start:
    """Read the header of a checkpoint folder, or of a file in which a guarded run kept its start.

    Raises ValueError if it is neither, or was altered.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist (paths only: nothing is downloaded)")
    sidecar = sidecar_in(path)
    if sidecar is not None and not (path.is_dir() and holds_model(path)):
        return _open_sidecar(sidecar)
    if path.suffix == ".safetensors" and path.is_file() and WHOLE_START_DIGEST in read_header(path).metadata:
        return _open_whole(path)
    if not path.is_dir():
        raise ValueError(f"{path} is neither a checkpoint folder nor a reference that routeguard wrote")
    _refuse_run_without_start(path)
    config, tensors = open_plain(path)
    notes = () if sidecar is None else (beside_kept(path, sidecar),)
    return _of_model(f"the checkpoint {path}", path, config, tensors, notes)


def open_plain(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """`config.json` and the tensors of a checkpoint whose stored weights are what its model computes with.

    Raises ValueError for a quantised one, for one that carries an adapter, and for what is no checkpoint.
    """
    config = checkpoint_config(folder)
    _refuse_quantised(folder, config)
    tensors = stored_checkpoint(folder)
    refuse_adapters(folder, tensors)
    return config, tensors


def read_routes(folder: Path, config: dict[str, Any], tensors: Mapping[str, StoredTensor], **options: Any) -> Routes:
    """`resolve` for files that nobody vouches for: a config with values of other kinds is a ValueError too."""
    layers = text_config(config).get("num_hidden_layers")
    if isinstance(layers, (int, float)) and layers > MAX_LAYERS:
        raise ValueError(f"{folder / 'config.json'} claims {layers:g} layers; no model has that many")
    try:
        return resolve(config, tensors, **options)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{folder / 'config.json'} describes no model that can be read: {type(error).__name__}: {error}"
        ) from error


def refuse_adapters(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError for a whole checkpoint that carries an adapter: its rows are not what the model applies."""
    inside = [tensor.name for tensor in tensors.values() if ".lora_" in tensor.name or ".base_layer." in tensor.name]
    beside = (folder / "adapter_config.json").is_file()
    if inside or beside:
        where = f"inside it ({inside[0]})" if inside else "beside it (adapter_config.json), which transformers loads"
        raise ValueError(
            f"{folder} holds a whole model and an adapter {where}: its weights alone are not the model. Merge the "
            "adapter (merge_and_unload) and save the result, or move the adapter to a folder of its own"
        )


def _refuse_quantised(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint whose weights are stored quantised."""
    method = quantisation_of(config) or ("gptq" if (folder / "quantize_config.json").is_file() else "")
    if method:
        raise ValueError(
            f"{folder} is quantised ({method}): the rows of a quantised weight mean nothing without its scales. Take "
            "the unquantised checkpoint, or load the model, call model.dequantize(), and save it"
        )


def _of_model(
    origin: str, folder: Path, config: dict[str, Any], tensors: Mapping[str, StoredTensor], notes: tuple[str, ...]
) -> Start:
    """The start that is a whole model; `folder` has its config."""
    routes = read_routes(folder, config, tensors, roles=ROLES, norms=True, shared=True)
    named = [replace(route, parameter=canonical_name(route.parameter)) for route in routes]
    meaning = meaning_of_config(config, routes)
    return Start(origin, tensors, {}, named, is_sidecar=False, meaning=meaning, notes=notes, folder=folder)


def _open_whole(path: Path) -> Start:
    """`RUN/routeguard/start.safetensors`, the start of every weight, by the config of the model that RUN saved."""
    run = path.parent.parent
    tensors = stored_tensors([path])
    what = f"{path} is the start that a guarded run kept"
    if any(".lora_" in name or ".modules_to_save." in name for name in tensors):
        raise ValueError(f"{what} of its adapters, not of a whole model; give the base checkpoint instead")
    if not (run / "config.json").is_file():
        raise ValueError(
            f"{what} of every weight, but {run} has no config.json to read it by. Save the run's model there "
            f"(trainer.save_model()), or do it in Python: routeguard.average(model, {str(path)!r})"
        )
    config = checkpoint_config(run)
    _refuse_quantised(run, config)
    return _of_model(f"{path} (every weight at the start of a guarded run)", run, config, tensors, ())


def _refuse_run_without_start(folder: Path) -> None:
    """Raise ValueError for the folder of a guarded run that kept no start, if it holds no model either."""
    places = (folder / STATE_FILE, folder / SIDECAR_FOLDER / STATE_FILE)
    state = next((place for place in places if place.is_file()), None)
    if state is None or (folder / "config.json").is_file():
        return
    content = read_json(state)
    mode = content.get("protect") if isinstance(content, dict) else None
    frozen = isinstance(mode, dict) and mode.get("mode") == Freeze.name
    why = "a frozen run, whose queries and keys are at their start, keeps none" if frozen else "it is not here"
    raise ValueError(f"{folder} holds no start ({why}); give the checkpoint that the run started from")


def _open_sidecar(path: Path) -> Start:
    facts = read_facts(path)
    tensors = stored_tensors([path])
    refuse_altered(path, digest_on_disk(facts, tensors), facts["digest"])
    routes = [
        replace(route, parameter=canonical_name(route.parameter))
        for members in facts["routes"].values()
        for route in map(route_from_json, members)
    ]
    rows = {name: rows_from_json(value) for name, value in facts["rows"].items()}
    return Start(
        f"{path} ({facts['origin']})",
        tensors,
        rows,
        list(dict.fromkeys(routes)),
        is_sidecar=True,
        meaning=facts["meaning"],
    )
