"""What a config class of transformers takes, asked of the class: a dataclass in new releases, a plain one before."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class MissingHereError(Exception):
    """The installed transformers lacks a model type, or a field that a case sets."""


@dataclass(frozen=True)
class SubConfig:
    """A sub-config by default: its class (or AutoConfig) and model type, and what its owner sets.

    Args:
        optional: whether the owner's default is None.
        as_mapping: whether the owner takes a mapping only; new releases take an instance.
    """

    config_class: type
    model_type: str
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False
    as_mapping: bool = False


def config_defaults(config_class: type) -> dict[str, Any]:
    """The fields of a config class with their defaults."""
    if dataclasses.is_dataclass(config_class):
        return {field.name: field.default for field in dataclasses.fields(config_class)}
    parameters = list(inspect.signature(config_class.__init__).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD}


@functools.cache
def sub_config_specs(config_class: type) -> Mapping[str, SubConfig]:
    """The sub-configs of a config class by name."""
    if hasattr(config_class, "sub_configs_defaults"):
        return {
            name: SubConfig(spec.config_class, spec.model_type, spec.init_kwargs, spec.optional)
            for name, spec in config_class.sub_configs_defaults.items()
        }
    owner, specs = config_class(), {}
    for name, named_class in config_class.sub_configs.items():
        default = getattr(owner, name, None)
        chosen = named_class if default is None else type(default)
        specs[name] = SubConfig(chosen, chosen.model_type, optional=default is None, as_mapping=True)
    return specs


def settable(config_class: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides by the names this release has for them; MissingHereError where it has none.

    Dataclasses refuse unknown fields themselves, or keep those that their model reads; plain classes swallow them.
    """
    if dataclasses.is_dataclass(config_class):
        return dict(overrides)
    defaults = config_defaults(config_class)
    renamed = {_earlier_name(name, defaults): value for name, value in overrides.items()}
    if unknown := sorted(renamed.keys() - defaults.keys()):
        raise MissingHereError(f"{config_class.__name__} has no {', '.join(unknown)}")
    return renamed


def _earlier_name(name: str, defaults: Mapping[str, Any]) -> str:
    return "rope_scaling" if name == "rope_parameters" and name not in defaults else name
