"""The lines that would guard a run, for the tool whose config was read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from routeguard.doctor.adapters import target_lines
from routeguard.doctor.read_config import AXOLOTL_PLUGIN
from routeguard.doctor.settings import TrainingSettings
from routeguard.protect.lora_targets import LoraTargets
from routeguard.protect.modes import Freeze
from routeguard.protect.recipes import Recipe

_PAGE = "docs/integrations.md, TRL's command line"


def recipe_lines(settings: TrainingSettings, chosen: Recipe, targets: LoraTargets | None) -> tuple[str, ...]:
    """Python, and where adapters should leave routing alone, YAML.

    Args:
        settings: of the run.
        chosen: what the guard shall do.
        targets: adapters beside routing, if the run has adapters that should be changed; None if not.
    """
    if settings.tool == "axolotl":
        plugins = ", ".join((*settings.plugins, AXOLOTL_PLUGIN))
        lines = ["# in the config", f"plugins: [{plugins}]", *_section(settings, chosen)]
        return (*lines, *(target_lines(targets, settings.tool) if targets is not None else ()))
    if settings.tool == "llama-factory":
        section = _section(settings, chosen)
        train = "python -m routeguard.integrations.llamafactory CONFIG"
        return ("# in the config", *section, "", "# instead of llamafactory-cli train", train) if section else (train,)
    arguments, names = _arguments(chosen)
    guard, imported = f"RouteGuard({arguments})", f"from routeguard import {', '.join(sorted(names))}"
    lines = ["from trl import SFTTrainer", imported, ""]
    if settings.model is not None:  # of a config
        lines.insert(0, f"# `trl sft` takes no callback. A script that reads the same config: {_PAGE}")
    lines.append(f"trainer = SFTTrainer(..., callbacks=[{guard}])")
    if targets is None:
        return tuple(lines)
    return (*lines, "", "# in the config", *target_lines(targets, settings.tool))


def _section(settings: TrainingSettings, chosen: Recipe) -> list[str]:
    """The section `routeguard` of a config; nothing where the default or the config's own section says it."""
    lines = []
    for argument, mode in _given(chosen).items():
        options = {} if mode == type(mode)() else asdict(mode)
        named = f"{{mode: {mode.name}, {', '.join(f'{k}: {v}' for k, v in options.items())}}}" if options else mode.name
        lines.append(f"  {argument}: {named}")
    return [] if not lines or settings.guard is not None else ["routeguard:", *lines]


def _given(chosen: Recipe) -> dict[str, Any]:
    given = {"protect": None if isinstance(chosen.protect, Freeze) else chosen.protect, "restore": chosen.restore}
    return {argument: mode for argument, mode in given.items() if mode is not None}


def _arguments(chosen: Recipe) -> tuple[str, list[str]]:
    """The arguments of `RouteGuard`, and the names of routeguard that they use."""
    parts, names = [], ["RouteGuard"]
    for argument, mode in _given(chosen).items():
        plain = mode == type(mode)()
        parts.append(f"{argument}={mode.name!r}" if plain else f"{argument}={mode!r}")
        names += [] if plain else [type(mode).__name__]
    return ", ".join(parts), names
