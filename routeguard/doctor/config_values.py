"""Values of a training config, as tools write them: each read as what it must be, or refused with its key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "null", "")


class Values:
    """The keys of one config file, and which of them were asked for.

    Args:
        path: the file, for messages; paths inside it are looked up from here too.
        content: key to value.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.content = content
        self.asked: set[str] = set()

    def get(self, *keys: str) -> Any:
        """The value of the first key that is there and not null."""
        self.asked.update(keys)
        return next((self.content[key] for key in keys if self.content.get(key) is not None), None)

    def text(self, *keys: str) -> str | None:
        value = self.get(*keys)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(keys, value, "a text")

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        try:
            return default if value is None else float(value)  # YAML reads 1e-5 as a text
        except (TypeError, ValueError):
            raise self._wrong((key,), value, "a number") from None

    def count(self, key: str, default: int) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self._wrong((key,), value, "a whole number")
        return int(value)

    def flag(self, *keys: str, default: bool = False) -> bool:
        value = self.get(*keys)
        if value is None:
            return default
        if str(value).lower() not in (*_YES, *_NO):
            raise self._wrong(keys, value, "true or false")
        return str(value).lower() in _YES

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, or one text with commas between them."""
        value = self.get(key)
        if value is None:
            return ()
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise self._wrong((key,), value, "a list of names")
        return tuple(part.strip() for part in parts if part.strip())

    def settings(self, key: str) -> dict[str, Any]:
        """A nested mapping, or the JSON file that the value names. Raises ValueError where there is no such file."""
        value = self.get(key)
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        if not isinstance(value, str):
            raise self._wrong((key,), value, "a mapping or the path of a JSON file")
        place = next((p for p in (Path(value), self.path.parent / value) if p.is_file()), None)
        if place is None:
            raise ValueError(f"{self.path}: {key} names {value}, which is not a file")
        try:
            content = json.loads(place.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{place} ({key} of {self.path}) is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{place} ({key} of {self.path}) is not a JSON object")
        return content

    def _wrong(self, keys: tuple[str, ...], value: object, expected: str) -> ValueError:
        key = next((key for key in keys if key in self.content), keys[0])
        return ValueError(f"{self.path}: {key} is {value!r}, not {expected}")


def read_values(path: Path) -> Values:
    """A YAML or JSON file with keys on its top level. Raises ValueError for anything else."""
    import yaml  # type: ignore[import-untyped]

    if not path.is_file():
        raise ValueError(f"{path} is not a file; give a training config (YAML or JSON)")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is neither YAML nor JSON: {reason}") from None
    if not isinstance(content, dict) or not content or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path} holds no settings: a training config is a list of `key: value` lines")
    return Values(path, content)
