"""Where a repair of a checkpoint on disk may read and write, checked before anything is read."""

from __future__ import annotations

from pathlib import Path

from routeguard.checkpoint.in_place import refuse_interrupted
from routeguard.checkpoint.sidecar import SIDECAR_FILE, SIDECAR_FOLDER


def free_place(tuned: Path, out: Path | None, *, in_place: bool) -> Path | None:
    """Where to write; None is in place. Raises ValueError for a place that would lose something."""
    if not tuned.is_dir():
        raise ValueError(f"{tuned} is not a folder with a checkpoint or an adapter")
    if in_place == (out is not None):
        raise ValueError("give either out=FOLDER (--out) for a repaired copy, or in_place=True (--in-place)")
    if out is None:
        return None
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already; choose another folder, nothing is overwritten")
    if out.resolve().is_relative_to(tuned.resolve()):
        raise ValueError(f"{out} lies inside {tuned}, which is being copied; choose a folder outside")
    return out


def refuse_base(base: Path, tuned: Path, target: Path | None) -> None:
    """Raise ValueError where BASE is TUNED, would be written into, or was itself left half restored."""
    if not base.is_dir():
        return
    if base.resolve() == tuned.resolve():
        raise ValueError(
            f"BASE and TUNED are the same folder, {tuned}: there is nothing to bring back from it (if a guarded run "
            f"kept its start there, give {tuned / SIDECAR_FOLDER / SIDECAR_FILE} as BASE)"
        )
    if target is not None and target.resolve().is_relative_to(base.resolve()):
        raise ValueError(f"{target} lies inside BASE, {base}; choose a folder outside")
    refuse_interrupted(base)
