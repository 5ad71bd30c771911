"""axolotl's plug-in: `plugins: [routeguard.integrations.axolotl.RouteGuardPlugin]`, settings under `routeguard:`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from routeguard.integrations.settings import SECTION, guard_from_settings

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError(
        f"routeguard.integrations.axolotl is a plug-in for axolotl, which cannot be imported here: {error}"
    ) from error


class RouteGuardArguments(BaseModel):
    """The key that axolotl's config gets from the plug-in: a mapping of the guard's settings."""

    routeguard: dict[str, Any] | None = None


class RouteGuardPlugin(BasePlugin):  # type: ignore[misc]
    """Guard every run of a config that lists this plug-in; without settings, by `RouteGuard()`."""

    def register(self, cfg: Any) -> None:
        """Refuse settings that make no sense before a model is loaded. Raises ValueError."""
        guard_from_settings(cfg.get(SECTION))

    def get_input_args(self) -> str:
        """Where axolotl finds the keys that its config may have on top of its own."""
        return f"{RouteGuardArguments.__module__}.{RouteGuardArguments.__qualname__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The guard, in time for the Trainer's constructor."""
        return [guard_from_settings(cfg.get(SECTION))]
