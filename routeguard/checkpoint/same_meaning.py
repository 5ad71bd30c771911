"""Do two checkpoints give query and key weights the same meaning, also where their configs are spelled differently?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routeguard.checkpoint.start import Start
from routeguard.restoration.meaning import check_same_meaning, meaning_of_config
from routeguard.routes.collection import Routes


def compare_meaning(
    folder: Path, config: dict[str, Any], whole: Routes, start: Start, *, insist: bool
) -> tuple[str, ...]:
    """Compare `config.json` as written, and where that leaves anything open, as transformers reads it. Returns notes.

    Versions of transformers write the same settings under other names, or leave defaults out. So where the two files
    differ, or one says what the other does not, transformers reads both (no code of the folder runs, no weights are
    loaded), and what it makes of them is compared.

    Args:
        folder, config: of TUNED.
        whole: routes of all its full-attention layers.
        start: BASE.
        insist: go on although they differ.

    Raises ValueError, listing the facts with both values, if they differ and `insist` is False.
    """
    written = meaning_of_config(config, whole)
    if written == start.meaning:
        return ()
    from routeguard.restoration.sources import complete_config  # with torch and transformers: only where it matters

    completed = complete_config(folder)
    if completed is not None:
        tuned = meaning_of_config(completed, whole)
        if start.folder is None:
            return check_same_meaning(tuned, start.meaning, insist=insist)
        other = complete_config(start.folder)
        if other is not None:
            geometry = {name: value for name, value in start.meaning.items() if name in meaning_of_config({}, whole)}
            return check_same_meaning(tuned, {**geometry, **meaning_of_config(other)}, insist=insist)
    return check_same_meaning(written, start.meaning, insist=insist)
