"""`Results`: what was measured, written to a file after each method, so that an interrupted run leaves what it has."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl", "peft")


class Results:
    """Settings, versions, and by method what was noted of it.

    Args:
        file: JSON, written after each note. None: nothing is written.
        settings: of the run.
    """

    def __init__(self, file: Path | None, **settings: Any) -> None:
        self.file = file
        versions = {name: version(name) for name in PACKAGES}
        self.found: dict[str, Any] = {"settings": settings, "versions": versions, "methods": {}}

    def note_settings(self, **settings: Any) -> None:
        self.found["settings"].update(settings)
        self._write()

    def note(self, method: str, **values: Any) -> None:
        self.found["methods"].setdefault(method, {}).update(values)
        self._write()

    def _write(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
