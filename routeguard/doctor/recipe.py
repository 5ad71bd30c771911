"""The lines that would guard a run, for the tool whose config was read."""

from __future__ import annotations

from routeguard.doctor.adapters import target_lines
from routeguard.doctor.settings import TrainingSettings
from routeguard.protect.lora_targets import LoraTargets
from routeguard.protect.modes import Freeze
from routeguard.protect.recipes import Recipe


def recipe_lines(settings: TrainingSettings, chosen: Recipe, targets: LoraTargets | None) -> tuple[str, ...]:
    """Python, and where adapters should leave routing alone, YAML.

    Args:
        settings: of the run.
        chosen: what the guard shall do.
        targets: adapters beside routing, if the run has adapters that should be changed; None if not.
    """
    arguments, names = _arguments(chosen)
    guard, imported = f"RouteGuard({arguments})", f"from routeguard import {', '.join(sorted(names))}"
    if settings.tool == "axolotl":
        lines = [
            "# guard_plugin.py, beside the config",
            "from axolotl.integrations.base import BasePlugin",
            imported,
            "",
            "class GuardPlugin(BasePlugin):",
            "    def add_callbacks_pre_trainer(self, cfg, model):",
            f"        return [{guard}]",
            "",
            "# in the config",
            "plugins: [guard_plugin.GuardPlugin]",
        ]
        return (*lines, *(target_lines(targets, settings.tool) if targets is not None else ()))
    if settings.tool == "llama-factory":
        return (
            "from llamafactory.train.tuner import run_exp",
            imported,
            "",
            f"run_exp(callbacks=[{guard}])  # python this_file.py CONFIG",
        )
    lines = ["from trl import SFTTrainer", imported, ""]
    lines.append(f"trainer = SFTTrainer(..., callbacks=[{guard}])")
    if targets is None:
        return tuple(lines)
    return (*lines, "", "# in the config", *target_lines(targets, settings.tool))


def _arguments(chosen: Recipe) -> tuple[str, list[str]]:
    """The arguments of `RouteGuard`, and the names of routeguard that they use."""
    given = {"protect": None if isinstance(chosen.protect, Freeze) else chosen.protect, "restore": chosen.restore}
    parts, names = [], ["RouteGuard"]
    for argument, mode in given.items():
        if mode is None:
            continue
        plain = mode == type(mode)()
        parts.append(f"{argument}={mode.name!r}" if plain else f"{argument}={mode!r}")
        names += [] if plain else [type(mode).__name__]
    return ", ".join(parts), names
