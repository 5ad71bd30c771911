"""`StateTransitionConfig`: everything that a conversion needs besides the base model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Gate = Literal["head", "channel", "none"]
Features = Literal["unit", "identity"]
ReadNorm = Literal["rms", "none"]
AlphaRule = Literal["min", "max"]
RunningMean = Literal["raw", "corrected"]
SCHEMA_VERSION = 1
_CHOICES = {
    "gate": Gate,
    "features": Features,
    "read_norm": ReadNorm,
    "alpha_rule": AlphaRule,
    "running_mean": RunningMean,
}


@dataclass(frozen=True)
class StateTransitionConfig:
    """How steps are marked, and how finished steps are remembered.

    Attributes:
        start_token_ids: tokens that open a step, one for each thinking pattern.
        end_token_id: the token that closes a step.
        rank: of the linear path's adapters on the frozen query, key and value projections. Default 16 (ours).
        adapter_scale: what the adapters' output is multiplied by. Default 1 (ours).
        gate: the sigmoid gate has one value a head ("head", default, ours), one a channel ("channel", the paper's
            product), or there is none ("none", for ablations).
        features: of queries and keys in the linear path: each head's vector at unit length ("unit", default, ours: sums
            over long texts stay bounded whatever the base model's scale) or as it is ("identity", the paper's).
        read_norm: what a head reads is brought to a root mean square of 1 ("rms", default, ours: sums grow with the
            text, and a multiplier that starts at 0 could not be learned) or left as it is ("none", the paper's).
        max_alpha: the largest weight of the momentum, 0 to 1. Default 0.4 (not given by the paper); 0: no momentum.
        max_steps: |T|, with which that weight grows. Default 32 (ours).
        alpha_rule: "min" (default): `min(max_alpha, t/|T|)`, what the paper's prose says; "max": what it prints,
            `max(max_alpha, t/|T|)`, 1 at most.
        running_mean: of the steps' own updates ("raw", default) or of the corrected ones ("corrected"); the paper
            leaves it open.
        layers: decoder layers to convert. None (default): every full-attention layer.
        chunk_tokens: tokens of a step handled at once in training; changes speed and memory, not results. Default 64.

    Raises ValueError for values that make no sense.

    Source: arXiv 2602.01198 (linear attention path, momentum); what is ours is marked.
    """

    start_token_ids: tuple[int, ...]
    end_token_id: int
    rank: int = 16
    adapter_scale: float = 1.0
    gate: Gate = "head"
    features: Features = "unit"
    read_norm: ReadNorm = "rms"
    max_alpha: float = 0.4
    max_steps: int = 32
    alpha_rule: AlphaRule = "min"
    running_mean: RunningMean = "raw"
    layers: tuple[int, ...] | None = None
    chunk_tokens: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_token_ids", _integers("start_token_ids", self.start_token_ids))
        if self.layers is not None:
            layers = _integers("layers", self.layers)
            if not layers or min(layers) < 0:
                raise ValueError(
                    f"layers must be decoder layers, counted from 0; got {self.layers!r}, which converts nothing. "
                    "Leave it out for every full-attention layer"
                )
            object.__setattr__(self, "layers", tuple(sorted(set(layers))))
        if not _is_integer(self.end_token_id):
            raise ValueError(f"end_token_id must be one token id; got {self.end_token_id!r}")
        ids = self.token_ids
        if not self.start_token_ids or len(set(ids)) < len(ids) or min(ids) < 0:
            raise ValueError(
                f"steps need at least one start token and an end token, all different and not negative; got start "
                f"{self.start_token_ids}, end {self.end_token_id}"
            )
        for name in ("rank", "max_steps", "chunk_tokens"):
            value = getattr(self, name)
            if not _is_integer(value) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")
        if not _is_number(self.max_alpha) or not 0 <= self.max_alpha <= 1:
            raise ValueError(f"max_alpha must be between 0 and 1; got {self.max_alpha!r}")
        if not _is_number(self.adapter_scale):
            raise ValueError(f"adapter_scale must be a finite number; got {self.adapter_scale!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All step tokens: the starts, then the end."""
        return (*self.start_token_ids, self.end_token_id)

    def to_json(self) -> str:
        """All settings and the schema version, as JSON."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StateTransitionConfig:
        """From what `to_json` wrote; ValueError for another schema version, and for unknown or missing settings."""
        values = dict(data)
        version = values.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"state-transition settings of schema version {version}; this version reads {SCHEMA_VERSION}"
            )
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"unknown state-transition settings {unknown}; there are {sorted(cls.__dataclass_fields__)}"
            )
        missing = sorted({"start_token_ids", "end_token_id"} - set(values))
        if missing:
            raise ValueError(f"state-transition settings without {missing}")
        return cls(**values)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    """One integer, or several in a sequence, as a tuple."""
    if _is_integer(value):
        return (value,)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(_is_integer(i) for i in value):
        raise ValueError(f"{name} must be integers; got {value!r}")
    return tuple(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
