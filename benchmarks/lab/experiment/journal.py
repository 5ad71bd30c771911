"""Results on disk: one JSON line a condition and seed, one file for each architecture and data kind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from routeguard.storage.locks import folder_lock

RESULTS = Path("docs/evidence/results")
SCHEMA_VERSION = 1

Result = dict[str, Any]


def path_for(architecture: str, data: str, folder: Path = RESULTS) -> Path:
    """The file of an architecture and a data kind."""
    return folder / f"{architecture}-{data}.jsonl"


def append(path: Path, result: Mapping[str, Any]) -> None:
    """Add one line, whole or not at all, also while other processes add theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"schema_version": SCHEMA_VERSION, **result}, sort_keys=False) + "\n"
    with folder_lock(path.parent, wait=True):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = "\n" + line  # what a killed process left is a line of its own
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: Path) -> list[Result]:
    """The results of a file, in order; half-written lines are left out.

    Raises ValueError for another schema version.
    """
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), start=1):
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}, line {number} has schema version {result.get('schema_version')}, not {SCHEMA_VERSION}"
            )
        results.append(result)
    return results


def read_all(folder: Path = RESULTS) -> list[Result]:
    """The results of every architecture and data kind."""
    return [result for path in sorted(folder.glob("*-*.jsonl")) for result in read(path)]


def missing(path: Path, wanted: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the wanted results (each with its keys of `identity`, and `settings`) that are not there yet.

    Raises ValueError where a result of that name and seed has other settings.
    """
    there = {identity(result): result["settings"] for result in read(path)}
    still = []
    for result in wanted:
        found = there.get(identity(result))
        if found is None:
            still.append(result)
        elif found != json.loads(json.dumps(result["settings"])):
            raise ValueError(
                f"{path} has {result['condition']}, seed {result['seed']}, with other settings: {found} there, "
                f"{result['settings']} now. Give the condition a new name, or take the old lines out"
            )
    return still


def identity(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells two results apart."""
    return tuple(result[key] for key in ("architecture", "model_seed", "data", "seed", "condition"))
