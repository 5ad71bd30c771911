"""What an earlier run left in the folder of a new one: moved aside, so that nobody takes it for the new run's."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from routeguard.checkpoint.sidecar import SIDECAR_FILE
from routeguard.storage.aside import move_aside
from routeguard.training.run_state import RESTORE_FILE, WHOLE_START_FILE


def set_aside(folder: Path, *, written: Collection[str], named: Any) -> list[Path]:
    """Rename an earlier run's kept starts and its restore report (`reference.1.safetensors`); gives the new names.

    Args:
        folder: `OUTPUT/routeguard` of a run that begins.
        written: names of files that the new run writes or has written itself.
        named: the new run's `reference`; a file that it lies in stays.
    """
    moved = []
    for name in (SIDECAR_FILE, WHOLE_START_FILE, RESTORE_FILE):
        path = folder / name
        if name not in written and not _lies_in(path, named):
            aside = move_aside(path)
            moved += [] if aside is None else [aside]
    return moved


def _lies_in(path: Path, named: Any) -> bool:
    if not isinstance(named, (str, os.PathLike)):
        return False
    return Path(named).resolve() in (path.resolve(), path.parent.resolve(), path.parent.parent.resolve())
