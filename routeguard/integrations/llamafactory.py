"""LLaMA-Factory's training with a guard: `python -m routeguard.integrations.llamafactory CONFIG [key=value ...]`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from routeguard.integrations.settings import SECTION, guard_from_settings
from routeguard.training.guard import RouteGuard

_OTHER_TRAINERS = ("use_mca", "use_hyper_parallel", "use_ray")


def split_config(config: object) -> tuple[dict[str, Any], RouteGuard]:
    """LLaMA-Factory's own keys, and the guard that the section `routeguard` asks for (`RouteGuard()` without one).

    Args:
        config: the keys of a config for LLaMA-Factory, with or without that section.

    Raises:
        ValueError: no mapping, settings that make no sense, or a run that does not use the Trainer of transformers.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            "give the config as a YAML or JSON file: python -m routeguard.integrations.llamafactory CONFIG"
        )
    for key in _OTHER_TRAINERS:
        if config.get(key) or os.environ.get(key.upper(), "").lower() in ("1", "true", "y"):
            raise ValueError(f"{key} trains elsewhere than in this process's Trainer, where a guard was never tried")
    return {key: value for key, value in config.items() if key != SECTION}, guard_from_settings(config.get(SECTION))


def main() -> None:
    """Train as `llamafactory-cli train` does in one process (several: torchrun), guarded. Reads `sys.argv`."""
    try:
        from llamafactory.hparams import read_args
        from llamafactory.train.tuner import run_exp
    except ImportError as error:
        raise ImportError(
            f"routeguard.integrations.llamafactory trains by LLaMA-Factory, which cannot be imported here: {error}"
        ) from error
    config, guard = split_config(read_args())
    run_exp(config, callbacks=[guard])


if __name__ == "__main__":
    main()
