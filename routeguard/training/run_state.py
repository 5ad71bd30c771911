"""What a guarded run remembers on disk: `routeguard.json`, in the output folder and in every checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from routeguard.protect.modes import AtEnd, Protection
from routeguard.storage.durable import write_json

SCHEMA_VERSION = 1
FOLDER = "routeguard"  # inside the Trainer's output folder
STATE_FILE = "routeguard.json"
REFERENCE_FILE = "reference.safetensors"
WHOLE_START_FILE = "start.safetensors"  # every weight, kept where the run averages at its end
DRIFT_FILE = "drift.jsonl"
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
    """

    protect: dict[str, Any]
    restore: dict[str, Any] | None
    layers: tuple[int, ...]
    roles: tuple[str, ...]
    norms: bool
    reference_digest: str
    reference_origin: str
    stage: int = 1
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


def write_state(folder: Path, state: RunState) -> None:
    """Write `routeguard.json` atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STATE_FILE, asdict(state))


def read_state(folder: Path) -> RunState | None:
    """The state a guarded run left in a folder (or in its `routeguard/` subfolder); None if there is none.

    Raises ValueError for a file that is damaged or from another schema version.
    """
    path = next((p for p in (folder / STATE_FILE, folder / FOLDER / STATE_FILE) if p.is_file()), None)
    if path is None:
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema version {data.get('schema_version')}, this version reads {SCHEMA_VERSION}"
            )
        return RunState(**{**data, "layers": tuple(data["layers"]), "roles": tuple(data["roles"])})
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it only if the run shall be treated as unguarded"
        ) from None
