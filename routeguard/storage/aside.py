"""Move a file of an earlier run out of the way, instead of overwriting it."""

from __future__ import annotations

from pathlib import Path


def move_aside(path: Path) -> Path | None:
    """Rename a file to the first free `NAME.<n>.SUFFIX` beside it; gives the new name, None if there is no file."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)
