"""The files of a saved state transition."""

from __future__ import annotations

import json
from pathlib import Path

from routeguard.state_transition.config import StateTransitionConfig

CONFIG_FILE = "state_transition.json"
WEIGHTS_FILE = "state_transition.safetensors"


def read_config(folder: Path) -> StateTransitionConfig:
    """The settings in a folder; ValueError where it holds no state transition."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"{folder} holds no state transition ({CONFIG_FILE} and {WEIGHTS_FILE})")
    return StateTransitionConfig.from_dict(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
