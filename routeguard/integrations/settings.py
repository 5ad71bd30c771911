"""A guard from plain settings, as a section of a YAML config holds them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from routeguard.doctor.config_values import Values
from routeguard.protect.modes import as_at_end, as_protection
from routeguard.recall.probe import RecallProbe
from routeguard.routes.collection import ROUTING_ROLES, Role
from routeguard.training.guard import RouteGuard

SECTION = "routeguard"  # the key of a config under which the settings stand
KEYS = ("protect", "restore", "recipe", "reference", "layers", "roles", "norms", "insist", "probe")
_ONLY_PYTHON = ("tokenizer", "haystack")  # of RecallProbe: objects, which no config can hold


def guard_from_settings(settings: Mapping[str, Any] | None, where: str = SECTION) -> RouteGuard:
    """A guard from the keys of a config's section; an empty section is `RouteGuard()`.

    Args:
        settings: keys are arguments of `RouteGuard`. `protect` and `restore` are a name, or a mapping of `mode` and
            its options (`{mode: low_lr, scale: 0.05}`, as `routeguard.json` writes them); `probe` is a mapping of
            arguments of `RecallProbe`.
        where: the name of the section, for messages.

    Raises:
        ValueError: for a key that is not known, with the nearest that is, and for values that make no sense.
    """
    values = _section({} if settings is None else settings, where, KEYS)
    probe = values.content.get("probe")
    layers = values.get("layers")
    return RouteGuard(
        _mode(values, "protect", as_protection),
        _mode(values, "restore", as_at_end),
        recipe=values.text("recipe"),  # type: ignore[arg-type]  # the guard knows all recipes
        reference=values.text("reference"),
        layers=None if layers is None else _whole_numbers(layers, where),
        roles=_roles(values) or ROUTING_ROLES,
        norms=values.flag("norms"),
        insist=values.flag("insist"),
        probe=None if probe is None else _probe(probe, f"{where}.probe"),
    )


def _section(settings: object, where: str, known: Collection[str]) -> Values:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} is {settings!r}, not a mapping with keys from {', '.join(known)}")
    for key in settings:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f"; closest {close[0]!r}" if close else ""
            raise ValueError(f"{where}: key {key!r} is not understood{hint}; choose from {', '.join(known)}")
    return Values(Path(where), settings)


def _mode(values: Values, key: str, find: Any) -> Any:
    """A name as it is, or the mode that a mapping describes."""
    value = values.get(key)
    if not isinstance(value, Mapping):
        return value
    where = f"{values.path}.{key}"
    if value.get("mode") is None:
        raise ValueError(f"{where} is {dict(value)!r}, without the key `mode`, which names what the options are for")
    kind = type(find(value["mode"]))
    options = _section(value, where, ("mode", *(field.name for field in fields(kind))))
    return kind(**{f.name: options.number(f.name, 0.0) for f in fields(kind) if value.get(f.name) is not None})


def _roles(values: Values) -> tuple[Role, ...]:
    named = values.names("roles")
    wrong = [name for name in named if name not in ROUTING_ROLES]
    if wrong:
        raise ValueError(f"{values.path}: roles has {wrong[0]!r}; choose from {', '.join(ROUTING_ROLES)}")
    return tuple(role for role in ROUTING_ROLES if role in named)


def _whole_numbers(value: object, where: str) -> list[int]:
    if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise ValueError(f"{where}: layers is {value!r}, not a list of layer indices")
    return value


def _probe(settings: object, where: str) -> RecallProbe:
    known = [name for name in inspect.signature(RecallProbe).parameters if name not in _ONLY_PYTHON]
    arguments = _section(settings, where, known).content
    try:
        return RecallProbe(**arguments)
    except TypeError as error:  # a text where a number should be: YAML reads 1e-2 as a text, 0.01 as a number
        raise ValueError(f"{where}: {dict(arguments)!r} has a value of the wrong kind: {error}") from None
