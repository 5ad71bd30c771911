"""Versions and the like, as far as a run wrote them down. Nothing is taken from the machine that makes the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routeguard.recall.result import RecallResult
from routeguard.training.run_state import PACKAGES as KEPT_PACKAGES
from routeguard.training.run_state import STATE_FILE, RunState

PACKAGES = ("python", "routeguard", *KEPT_PACKAGES, "datasets", "tokenizers")
_SPELLINGS = {"pytorch": "torch"}
_CARD_LINE = re.compile(r"^[-*]\s*([A-Za-z]+):?\s+v?(\d\S*)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Recorded:
    """A fact and the file of the run that tells it; both None where none does."""

    name: str
    value: str | None
    source: str | None = None


def find_environment(
    state: RunState | None, folders: Iterable[Path], before: RecallResult | None
) -> tuple[Recorded, ...]:
    """What a run recorded about the model and the packages it used.

    Args:
        state: what the guard wrote: the versions that it ran with, which other files may add to.
        folders: the run's folder and its checkpoints, best first; their `config.json`, `adapter_config.json` and model
            card (the list of framework versions that TRL writes) are read.
        before: recall measured before the training, which names the model.
    """
    found: dict[str, Recorded] = {}

    def note(name: str, value: Any, source: str) -> None:
        if value not in (None, "") and name not in found:
            found[name] = Recorded(name, str(value), source)

    for name, version in ({} if state is None else state.versions).items():
        note(name, version, STATE_FILE)
    for folder in folders:
        config, adapter = _object(folder / "config.json"), _object(folder / "adapter_config.json")
        where = folder.name
        note("model type", config.get("model_type"), f"{where}/config.json")
        note("dtype", config.get("dtype") or config.get("torch_dtype"), f"{where}/config.json")
        note("transformers", config.get("transformers_version"), f"{where}/config.json")
        note("base model", adapter.get("base_model_name_or_path"), f"{where}/adapter_config.json")
        note("peft", adapter.get("peft_version"), f"{where}/adapter_config.json")
        for name, version in _card_versions(folder / "README.md").items():
            note(name, version, f"{where}/README.md")
    if before is not None:
        note("base model", before.settings.get("model"), "recall before")
    names = ("base model", "model type", "dtype", *PACKAGES)
    return tuple(found.get(name, Recorded(name, None)) for name in names)


def _card_versions(card: Path) -> dict[str, str]:
    if not card.is_file():
        return {}
    found = {}
    for name, version in _CARD_LINE.findall(card.read_text(encoding="utf-8", errors="replace")):
        name = _SPELLINGS.get(name.lower(), name.lower())
        if name in PACKAGES:
            found[name] = version
    return found


def _object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
