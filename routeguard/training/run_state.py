"""What a guarded run remembers on disk: `routeguard.json`, in the output folder and in every checkpoint."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from routeguard import __version__
from routeguard.checkpoint.sidecar import SIDECAR_FOLDER
from routeguard.protect.modes import AtEnd, Protection
from routeguard.storage.durable import write_json
from routeguard.training.coverage import Coverage

SCHEMA_VERSION = 1
STATE_FILE = "routeguard.json"
WHOLE_START_FILE = "start.safetensors"  # every weight, kept where the run averages at its end
WHOLE_START_DIGEST = "reference_digest"  # in its header: of the routing that the run protects
DRIFT_FILE = "drift.jsonl"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")  # whose versions are kept
RESTORE_FILE = "restore.json"  # what was put back, or averaged, at the end


@dataclass(frozen=True)
class RunState:
    """The guard's settings and the start that it protects.

    Attributes:
        protect, restore: mode name and its settings, for example `{"mode": "anchor", "strength": 100.0}`.
        layers, roles, norms: what is covered.
        reference_digest: sha256 of the protected start values.
        reference_origin: where they came from, in words.
        stage: 1 for the first guarded training of these weights, 2 for one that starts from a guarded run, ...
        coverage: the tensors that are held; None in a file of an earlier version.
        versions: of Python, routeguard and the packages it trains with, by name; empty in a file of an earlier version.
    """

    protect: dict[str, Any]
    restore: dict[str, Any] | None
    layers: tuple[int, ...]
    roles: tuple[str, ...]
    norms: bool
    reference_digest: str
    reference_origin: str
    stage: int = 1
    coverage: Coverage | None = None
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = field(default=SCHEMA_VERSION)

    def differences(self, other: RunState) -> list[str]:
        """Human-readable differences in what decides how training goes on, as "name: earlier → now"."""
        names = ("protect", "restore", "layers", "roles", "norms", "reference_digest")
        return [
            f"{name}: {getattr(self, name)!r} → {getattr(other, name)!r}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


def settings(mode: Protection | AtEnd | None) -> dict[str, Any] | None:
    """A mode as plain data."""
    return None if mode is None else {"mode": mode.name, **asdict(mode)}


def versions_here() -> dict[str, str]:
    """Versions of Python, routeguard and `PACKAGES` (those that are installed), by name; none of them is imported."""
    found = {"python": platform.python_version(), "routeguard": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_state(folder: Path, state: RunState) -> None:
    """Write `routeguard.json` atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STATE_FILE, asdict(state))


def read_state(folder: Path) -> RunState | None:
    """The state a guarded run left in a folder (or in its `routeguard/` subfolder); None if there is none.

    Raises ValueError for a file that is damaged or from another schema version.
    """
    path = next((p for p in (folder / STATE_FILE, folder / SIDECAR_FOLDER / STATE_FILE) if p.is_file()), None)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError(f"{type(data).__name__}, not an object")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema version {data.get('schema_version')}, this version reads {SCHEMA_VERSION}"
            )
        found = data.get("coverage")
        coverage = None if found is None else Coverage.from_dict(found)
        lists = {"layers": tuple(data["layers"]), "roles": tuple(data["roles"])}
        return RunState(**{**data, **lists, "coverage": coverage})
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it only if the run shall be treated as unguarded"
        ) from None
