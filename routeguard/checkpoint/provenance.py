"""What was done to a restored checkpoint, in a file beside its weights: `routeguard/provenance.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routeguard.checkpoint.sidecar import SIDECAR_FOLDER
from routeguard.storage.durable import sync, write_json
from routeguard.storage.folder import read_json

SCHEMA_VERSION = 1
PROVENANCE_FILE = "provenance.json"


def read_restores(folder: Path) -> list[dict[str, Any]]:
    """The restores recorded in a checkpoint folder, oldest first; empty if none.

    Raises ValueError when the file is damaged or of another schema version.
    """
    path = folder / SIDECAR_FOLDER / PROVENANCE_FILE
    if not path.is_file():
        return []
    content = read_json(path)
    restores = content.get("restores") if isinstance(content, dict) else None
    if not isinstance(restores, list) or content.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} is damaged, or not of schema version {SCHEMA_VERSION}, which this version reads. It is only a "
            "record: move it away and try again"
        )
    if not all(isinstance(restore, dict) and isinstance(restore.get("tensors"), list) for restore in restores):
        raise ValueError(f"{path} is damaged. It is only a record: move it away and try again")
    return restores


def record_restore(folder: Path, facts: dict[str, Any]) -> None:
    """Add one restore to the record, atomically."""
    _write(folder, [*read_restores(folder), facts])


def forget_last_restore(folder: Path) -> None:
    """Take the last restore off the record (it is being undone); an empty record is removed."""
    _write(folder, read_restores(folder)[:-1])


def _write(folder: Path, restores: list[dict[str, Any]]) -> None:
    path = folder / SIDECAR_FOLDER / PROVENANCE_FILE
    if restores:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"schema_version": SCHEMA_VERSION, "restores": restores})
    elif path.is_file():
        path.unlink()
        sync(path.parent)
