"""ms-swift's callback: two lines in a file for `--external_plugins`, and `--callbacks routeguard`."""

from __future__ import annotations

from typing import Any

from routeguard.training.guard import RouteGuard

try:
    from swift.callbacks import callbacks_map
except ImportError as error:
    raise ImportError(
        f"routeguard.integrations.swift registers a callback with ms-swift 4, which cannot be imported here: {error}"
    ) from error

NAME = "routeguard"


def register(**arguments: Any) -> None:
    """Let `--callbacks routeguard` put a guard on the run.

    Args:
        arguments: those of `RouteGuard`.

    Raises ValueError for arguments that make no sense.
    """
    RouteGuard(**arguments)  # refuses now, not after the model is loaded

    def make(args: Any, trainer: Any) -> RouteGuard:
        return RouteGuard(**arguments)

    callbacks_map[NAME] = make
