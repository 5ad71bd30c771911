"""What a restore did, layer by layer, in the words that a restore in memory and one on disk share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from routeguard.protect.modes import Interpolate, QKPro, Restoration
from routeguard.routes.collection import ROUTING_ROLES, Route
from routeguard.routes.wording import as_printed

SCHEMA_VERSION = 1
WORTH_A_NOTE = 0.01  # share of the entries meant to move that rounding kept where they were


@dataclass(frozen=True)
class LayerRestore:
    """One full-attention layer.

    Attributes:
        layer: decoder layer index.
        tensors: names in `named_parameters()` of what was written.
        num_rows: rows written (for an adapter, those of B).
        drift_before: role to relative Frobenius distance of its weights from the start, before the restore. Roles whose
            distance cannot be told (DoRA, a base in 8 bits) are absent.
        changed_bytes: bytes of the entries whose value changed.
    """

    layer: int
    tensors: tuple[str, ...]
    num_rows: int
    drift_before: Mapping[str, float]
    changed_bytes: int


@dataclass(frozen=True)
class RestoreReport:
    """What `restore` did. `str()` prints it, `to_dict()` is JSON-serialisable.

    Attributes:
        method: the method with its setting, as text.
        origin: where the start values came from.
        layers: one entry for each layer that was written.
        notes: conversions, what was left alone and why, what could not be compared.
    """

    method: str
    origin: str
    layers: tuple[LayerRestore, ...]
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for layer in self.layers for name in layer.tensors)

    @property
    def changed_bytes(self) -> int:
        return sum(layer.changed_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "changed_bytes": self.changed_bytes, **asdict(self)}

    def __str__(self) -> str:
        head = (
            f"restored {len(self.tensors)} tensors in {len(self.layers)} layers with {self.method} from {self.origin}"
        )
        lines = [head, f"{'layer':>5}  {'tensors':>7}  {'rows':>6}  {'changed bytes':>13}  drift before"]
        for layer in self.layers:
            drift = ", ".join(f"{role} {value:.4f}" for role, value in layer.drift_before.items()) or "not measured"
            lines.append(
                f"{layer.layer:>5}  {len(layer.tensors):>7}  {layer.num_rows:>6}  {layer.changed_bytes:>13,}  {drift}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    _repr_pretty_ = as_printed


def describe_method(mode: Restoration, routes: Iterable[Route]) -> str:
    """A method with its setting, in words: "QK-Restore", "QK-Restore of query only", "QK-Pro (ridge 0.1)"."""
    roles = tuple(dict.fromkeys(route.role for route in routes))
    which = "" if set(roles) == set(ROUTING_ROLES) else f" of {', '.join(roles)} only"
    if isinstance(mode, QKPro):
        return f"QK-Pro (ridge {mode.ridge:g})"
    name = f"interpolation (alpha {mode.alpha:g})" if isinstance(mode, Interpolate) else "QK-Restore"
    return name + which


def conversion_notes(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each two dtypes (of the start, of what it is written to) that differ, with how many tensors."""
    from routeguard.storage.floats import is_exact

    counts = Counter(pair for pair in pairs if pair[0] != pair[1])
    return [
        f"{count} tensors converted from the start's {have} to {want} "
        f"({'exact' if is_exact(have, want) else 'rounded'})"
        for (have, want), count in counts.items()
    ]


def refuse_not_finite(bad: Sequence[str]) -> None:
    """Raise ValueError where routing rows hold NaN or infinities; `bad` says in words which."""
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise ValueError(
            f"NaN or infinite routing weights: {', '.join(bad[:4])}{more}; a run that diverged cannot be repaired by "
            "its queries and keys, use an earlier checkpoint"
        )
