"""One row of the zoo: a model type, the changes its tiny config needs and the class that builds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A tiny random model.

    Args:
        name: key in `CASES`; the model type, plus `/variant` when a model type has several cases.
        model_type: key of transformers' `CONFIG_MAPPING`.
        overrides: config fields that differ from `tiny.TINY_FIELDS`; a mapping under a sub-config's name goes there.
        model_class: name of the auto class, or of a concrete class, in `transformers`.
        runs: path of the submodule that runs the text where the wrapper itself cannot; "" for the model.
        stub_tower: whether a stub takes the place of an image tower that needs the timm package.
        forward: whether a CPU forward pass works with what the test environment has.
        reason: why `forward` is False.
        extra_inputs: what the forward pass demands besides `input_ids`: a shape for a random float tensor, "tokens" for
            random token ids, `("tokens", n)` for n streams of them, "zeros" for zeros `[1, num_tokens]`, or a value
            that is passed as it is.
    """

    name: str
    model_type: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    model_class: str = "AutoModelForCausalLM"
    runs: str = ""
    stub_tower: bool = False
    forward: bool = True
    reason: str = ""
    extra_inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.forward == bool(self.reason):
            raise ValueError(f"case {self.name!r}: give a reason exactly when forward is False")


def text(name: str, /, **overrides: Any) -> Case:
    """A decoder-only language model; `name` is `model_type` or `model_type/variant`."""
    return Case(name, name.partition("/")[0], overrides)


def image_text(name: str, extra_inputs: Mapping[str, Any] | None = None, /, **overrides: Any) -> Case:
    """A multimodal wrapper of the image-text-to-text auto class."""
    return Case(
        name, name.partition("/")[0], overrides, "AutoModelForImageTextToText", extra_inputs=dict(extra_inputs or {})
    )


def runs(submodule: str, case: Case, /) -> Case:
    """The case, with the text going to a submodule."""
    return dataclasses.replace(case, runs=submodule)


def stub_tower(case: Case, /) -> Case:
    """The case, with a stub for the image tower."""
    return dataclasses.replace(case, stub_tower=True)


def wrapper(name: str, model_class: str, extra_inputs: Mapping[str, Any] | None = None, /, **overrides: Any) -> Case:
    """A wrapper built by the class of that name in `transformers`."""
    return Case(name, name.partition("/")[0], overrides, model_class, extra_inputs=dict(extra_inputs or {}))


def mrope(*sections: int, **settings: Any) -> dict[str, Any]:
    """Rotary settings with a position stream for each of time, height and width."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **settings}
