"""The files of a saved state transition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routeguard.state_transition.config import StateTransitionConfig

CONFIG_FILE = "state_transition.json"
WEIGHTS_FILE = "state_transition.safetensors"
_BASE = "base_model_name_or_path"  # beside the settings, as PEFT names it


def write_config(folder: Path, config: StateTransitionConfig, base_model: str | None) -> None:
    """Write the settings, and which model they were used on (None where it has no name)."""
    data = {_BASE: base_model, **json.loads(config.to_json())}
    (folder / CONFIG_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> StateTransitionConfig:
    """The settings in a folder; ValueError where it holds no state transition."""
    return StateTransitionConfig.from_dict({name: value for name, value in _read(folder).items() if name != _BASE})


def read_base_model(folder: Path) -> str | None:
    """The name or path of the model that a folder's state transition was made with; None where that has none."""
    name = _read(folder).get(_BASE)
    return None if name is None else str(name)


def _read(folder: Path) -> dict[str, Any]:
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} holds no state transition: {' and '.join(missing)} missing")
    try:
        data = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{folder / CONFIG_FILE} holds a {type(data).__name__}, not settings")
    return data
