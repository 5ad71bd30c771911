"""The file in which a guarded run keeps the start of its routing: where it lies, how to read its facts. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routeguard.routes.collection import Rows, rows_from_json
from routeguard.storage.header import StoredTensor, read_header
from routeguard.storage.row_bytes import row_chunks

SCHEMA_VERSION = 1
METADATA_KEY = "routeguard"
SIDECAR_FOLDER = "routeguard"
SIDECAR_FILE = "reference.safetensors"


def sidecar_in(path: Path) -> Path | None:
    """The sidecar itself, or the one in a run's folder or in `routeguard/` inside it; None if there is none."""
    if path.is_file():
        return path if path.suffix == ".safetensors" and METADATA_KEY in read_header(path).metadata else None
    candidates = (path / SIDECAR_FILE, path / SIDECAR_FOLDER / SIDECAR_FILE)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read_facts(path: Path) -> dict[str, Any]:
    """What `save_reference` stored beside the tensors: digest, origin, rows, dims, meaning, routes, notes.

    Raises ValueError when the file is no sidecar of this version.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a guarded run keeps its reference in {SIDECAR_FOLDER}/{SIDECAR_FILE}")
    text = read_header(path).metadata.get(METADATA_KEY)
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but not a reference that routeguard wrote")
    facts: Any = json.loads(text)
    if not isinstance(facts, dict):
        raise ValueError(f"{path} is damaged: its description is not an object")
    version = facts.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path} was written with schema version {version}, this version reads {SCHEMA_VERSION}")
    absent = [name for name in ("digest", "origin", "rows", "dims", "meaning", "routes", "notes") if name not in facts]
    if absent:
        raise ValueError(f"{path} is damaged: its description lacks {', '.join(absent)}")
    return facts


def digest_header(name: str, rows: Rows | None, dim: int, shape: tuple[int, ...], dtype: str) -> bytes:
    """What the digest hashes before the bytes of a tensor. `dtype` is torch's name without the prefix."""
    ranges = None if rows is None else [list(pair) for pair in rows]
    return json.dumps([name, ranges, dim, list(shape), dtype]).encode() + b"\0"


def refuse_altered(path: Path, digest: str, stored_digest: str) -> None:
    """Raise ValueError if a sidecar's content does not match the digest that was written with it."""
    if digest != stored_digest:
        raise ValueError(
            f"{path} does not match its own digest: it was changed or damaged after it was written. Take it "
            "from a copy, or give the starting checkpoint instead"
        )


def digest_on_disk(facts: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """`Reference.digest` computed from the file, in bounded memory."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        rows = rows_from_json(facts["rows"].get(name))
        total.update(digest_header(name, rows, int(facts["dims"].get(name, 0)), tensor.shape, tensor.dtype))
        for chunk in row_chunks(tensor, None, 0):
            total.update(chunk)
    return total.hexdigest()


def beside_kept(folder: Path, sidecar: Path) -> str:
    """A note about a model's folder, taken at its own weights, in which a guarded run also kept its start."""
    return (
        f"{folder} also holds {sidecar.relative_to(folder)}, the start that a guarded run kept; its own weights were "
        "taken (give that file to take the other)"
    )
