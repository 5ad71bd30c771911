"""What training may do to routing, and how it is put back: small value objects, and the strings that stand for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Freeze:
    """Routing does not move: whole tensors lose their gradient, row ranges get zero gradient and are copied back."""

    name = "freeze"


@dataclass(frozen=True)
class LowLR:
    """Routing learns at `scale` times the learning rate of the other parameters.

    Args:
        scale: between 0 and 1, exclusive. Default 0.1 (our choice; 0 is `Freeze`, 1 is no protection).
    """

    scale: float = 0.1
    name = "low_lr"

    def __post_init__(self) -> None:
        if not (_is_finite(self.scale) and 0 < self.scale < 1):
            raise ValueError(
                f"LowLR(scale={self.scale!r}) is not a number between 0 and 1; use Freeze() for 0 and Track() "
                "for no protection"
            )


@dataclass(frozen=True)
class Anchor:
    """After each optimizer step, routing is pulled back: `p ← p + lr · strength · (start − p)` (decoupled L2-SP).

    Meaning of the strength: alone, the pull halves a displacement in `ln 2 / (lr · strength)` steps (693 steps for
    strength 100 at a rate of 1e-5); against AdamW, whose step on a steadily pushed entry is about `lr`, such an entry
    comes to rest about `1 / strength` from its start, at any learning rate (derived).

    Args:
        strength: positive; `lr * strength` must stay at most 1. Default 100 (our choice).
    """

    strength: float = 100.0
    name = "anchor"

    def __post_init__(self) -> None:
        if not (_is_finite(self.strength) and self.strength > 0):
            raise ValueError(f"Anchor(strength={self.strength!r}) is not a positive number")

    def half_life_steps(self, lr: float) -> float:
        """Steps after which the pull alone has halved a displacement at learning rate `lr`."""
        return math.log(2) / -math.log1p(-lr * self.strength) if lr * self.strength < 1 else 0.0


@dataclass(frozen=True)
class L2SP:
    """After each optimizer step *every* trained weight is pulled back: `p ← p + lr · strength · (start − p)`.

    L2-SP (arXiv 1802.01483) in decoupled form (derived), as `Anchor` does it with queries and keys alone. Its measure
    is the pull of the whole run, `strength · Σ lr` over the planned steps, which means the same at any learning rate
    and length: what moved early and is pushed no more goes back by the factor `exp(−total)`, and a weight that is
    pushed steadily goes `(1 − exp(−total)) / total` as far as it would unpulled, if steps are about `lr` (AdamW;
    derived).

    Where parameter groups learn at different rates, `total` is the pull of the fastest group, and the others are pulled
    less, in the ratio of their rates: nothing is pulled by more than `total`, and the order of the groups is nothing.

    Args:
        total: positive. Default 0.9 (measured on tiny models, docs/evidence): those go back by 0.41, go 0.66 as far.
    """

    total: float = 0.9
    name = "l2_sp"

    def __post_init__(self) -> None:
        if not (_is_finite(self.total) and self.total > 0):
            raise ValueError(f"L2SP(total={self.total!r}) is not a positive number")

    def strength(self, rates: float) -> float:
        """The strength that pulls by `total` in all, where the learning rates of all steps add up to `rates`."""
        if not (_is_finite(rates) and rates > 0):
            raise ValueError(f"the learning rates of the planned steps add up to {rates!r}: L2SP would never pull")
        return self.total / rates


@dataclass(frozen=True)
class Track:
    """Routing trains freely; its drift is measured. With `restore=QKRestore()` this is the paper's method."""

    name = "track"


@dataclass(frozen=True)
class QKRestore:
    """Put queries and keys back to their start at the end of training (QK-Restore paper, Algorithm 1)."""

    name = "qk"


@dataclass(frozen=True)
class QKPro:
    """Queries restored along the directions that the starting keys use, keys put back.

    The ridge form of the projection in the QK-Restore paper, §7.4.

    Args:
        ridge: λ relative to the mean eigenvalue of the keys' Gram matrix; 0 equals `QKRestore`, infinity restores
            the keys only. Default 0.1 (our choice).
    """

    ridge: float = 0.1
    name = "qk_pro"

    def __post_init__(self) -> None:
        if not _is_number(self.ridge) or math.isnan(self.ridge) or self.ridge < 0:
            raise ValueError(f"QKPro(ridge={self.ridge!r}) is negative or not a number")


@dataclass(frozen=True)
class Interpolate:
    """Move queries and keys the fraction `alpha` of the way back to their start (WiSE-FT on Q/K only).

    Args:
        alpha: 0 leaves the tuned weights, 1 is `QKRestore`. Default 0.5.
    """

    alpha: float = 0.5
    name = "interpolate"

    def __post_init__(self) -> None:
        if not (_is_finite(self.alpha) and 0 <= self.alpha <= 1):
            raise ValueError(f"Interpolate(alpha={self.alpha!r}) is not a number between 0 and 1")


@dataclass(frozen=True)
class Average:
    """At the end of training, move *every* weight the fraction `alpha` of the way back to its start (WiSE-FT).

    Args:
        alpha: above 0, up to 1 (the start itself). Default 0.1 (measured on tiny hybrids, docs/evidence).
    """

    alpha: float = 0.1
    name = "average"

    def __post_init__(self) -> None:
        checked_alpha(self.alpha)


Protection = Freeze | LowLR | Anchor | L2SP | Track
Restoration = QKRestore | QKPro | Interpolate
AtEnd = Restoration | Average  # what a guarded run may do when its training ends

_PROTECTIONS: dict[str, type[Any]] = {cls.name: cls for cls in (Freeze, LowLR, Anchor, L2SP, Track)}
_RESTORATIONS: dict[str, type[Any]] = {cls.name: cls for cls in (QKRestore, QKPro, Interpolate)}
_AT_END: dict[str, type[Any]] = {**_RESTORATIONS, Average.name: Average}


def as_protection(value: str | Protection) -> Protection:
    """A protection by its name ("freeze", "low_lr", "anchor", "l2_sp", "track"), or an object as it is.

    Raises ValueError, with the nearest name, for another.
    """
    if isinstance(value, (Freeze, LowLR, Anchor, L2SP, Track)):
        return value
    result: Protection = _named(value, _PROTECTIONS, "protect")
    return result


def as_restoration(value: str | Restoration) -> Restoration:
    """A restoration from "qk", "qk_pro", "interpolate" or an object. Raises ValueError with the nearest name."""
    if isinstance(value, (QKRestore, QKPro, Interpolate)):
        return value
    if value is None:
        raise ValueError("method=None restores nothing; choose 'qk', 'qk_pro' or 'interpolate'")
    if value == Average.name or isinstance(value, Average):
        raise ValueError(
            "averaging moves every weight, not only queries and keys: use routeguard.average(model, start, alpha), "
            "average_checkpoint, or `routeguard average`"
        )
    result: Restoration = _named(value, _RESTORATIONS, "method")
    return result


def as_at_end(value: str | AtEnd | None) -> AtEnd | None:
    """What a run does at its end: a restoration, "average" or `Average(alpha)`, or None for nothing."""
    if value is None or isinstance(value, (QKRestore, QKPro, Interpolate, Average)):
        return value
    result: AtEnd = _named(value, _AT_END, "restore")
    return result


def checked_alpha(alpha: float) -> float:
    """A fraction above 0 and at most 1. Raises ValueError for anything else."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha) or not 0 < alpha <= 1:
        raise ValueError(
            f"alpha={alpha!r} is not a number above 0 and up to 1: the fraction of the way back to the start (0 would "
            "change nothing, 1 gives the start itself)"
        )
    return float(alpha)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    return _is_number(value) and math.isfinite(value)


def _named(value: object, known: dict[str, type[Any]], argument: str) -> Any:
    if isinstance(value, str) and value in known:
        return known[value]()
    if isinstance(value, type) and value in known.values():
        return value()
    close = get_close_matches(str(value), known, n=1)
    hint = f"; closest {close[0]!r}" if close else ""
    choices = ", ".join(f"{name!r} ({cls.__name__}())" for name, cls in known.items())
    raise ValueError(f"{argument}={value!r} is not understood{hint}; choose from {choices}")
