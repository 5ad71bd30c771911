"""What a saved state transition is, read without torch."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from routeguard.state_transition.files import CONFIG_FILE, WEIGHTS_FILE, read_base_model, read_config


def holds_state_transition(folder: str | Path) -> bool:
    """Whether `StateTransition.save_pretrained` wrote to that folder."""
    return (Path(folder) / CONFIG_FILE).is_file()


def saved_transition(folder: str | Path) -> dict[str, Any]:
    """Base model, settings, converted layers and sizes of a saved one; of the weights only the header is read.

    Raises ValueError where the folder holds none.
    """
    from routeguard.storage.header import read_header

    folder = Path(folder)
    config = read_config(folder)
    tensors = read_header(folder / WEIGHTS_FILE).tensors
    layers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layers.")})
    parameters = sum(prod(tensor.shape) for tensor in tensors.values())
    return {
        "base_model_name_or_path": read_base_model(folder),
        **json.loads(config.to_json()),
        "layers": layers,
        "num_parameters": parameters,
        "tensors": len(tensors),
    }


def describe_saved(folder: str | Path) -> str:
    """The same in words."""
    found = saved_transition(folder)
    config = read_config(Path(folder))
    return (
        f"state transition: linear paths in layers {found['layers']}, {len(config.start_token_ids)} start tokens and "
        f"an end; {found['num_parameters']:,} trained parameters in {found['tensors']} tensors\n"
        f"base model: {found['base_model_name_or_path'] or 'not named'}; its queries and keys are frozen: "
        "routing cannot drift\n"
        f"rank {config.rank}, gate {config.gate!r}, features {config.features!r}, reads {config.read_norm!r}, momentum "
        f"up to {config.max_alpha:g} over {config.max_steps} steps ({config.alpha_rule}, {config.running_mean} mean)"
    )
