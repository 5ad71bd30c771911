"""What is left of a curve over distance at one length: measured, or carried on by a fit that is good enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from routeguard.diagnostics.decay_fit import DecayCurve, DecayFit, fit_decay

LEAST_R_SQUARED = 0.5
_NEAR_TOKENS = 32
_NEARBY = 0.1  # a curve is read at a length as its mean over lags within this share of it


@dataclass(frozen=True)
class Reach:
    """What is left of a curve at one length.

    Attributes:
        length: distance in tokens.
        share: of what is usual nearby (the median of the positive values at 1 to 32 tokens); from 0, may exceed 1; nan
            where it was not measured and no good fit says it.
        measured: read off the curve; otherwise, if the share is a number, from the exponential fit.
    """

    length: int
    share: float
    measured: bool

    @property
    def known(self) -> bool:
        return not math.isnan(self.share)


def reach(curve: DecayCurve, length: int, *, extrapolate: bool = True) -> Reach:
    """Read a curve at a length, as a share of what is usual at 1 to 32 tokens.

    Within the measured lags it is the mean of the curve nearby. Beyond them it is the fit, if `fit_weakness` finds
    nothing against it, but at most what was measured at the end; with `extrapolate=False` nothing is said there.
    """
    measured = curve.counts.sum(0) > 0
    lags, values = curve.lags[measured], curve.values[measured]
    # Not the value at one token, nor the largest: a text may never repeat a token at once, and single lags stand out.
    nearby = values[(lags >= 1) & (lags <= _NEAR_TOKENS)]
    if not (nearby > 0).any():
        return Reach(length, math.nan, False)
    usual = float(np.median(nearby[nearby > 0]))

    def read(at: int) -> float:
        near = (lags >= at * (1 - _NEARBY)) & (lags <= at * (1 + _NEARBY))
        return max(float(values[near].mean()) / usual, 0.0) if near.any() else math.nan

    last = int(lags[-1])
    if length <= last and not math.isnan(read(length)):
        return Reach(length, read(length), True)
    fit = curve_fit(curve)
    if fit is None or fit_weakness(fit) or not extrapolate:
        return Reach(length, math.nan, False)
    return Reach(length, min(fit.at(length) / usual, read(last)), False)


def fit_weakness(fit: DecayFit | None) -> str:
    """Why a fit cannot be carried on beyond what was measured; empty where it can.

    Good enough is a fall with R² of 0.5 or more, and a 95 % interval of W that is narrower than W (an error of at most
    a quarter of W). The limits are ours.
    """
    if fit is None:
        return "nothing could be fitted"
    if math.isinf(fit.width_tokens):
        return "no fall was seen"
    if fit.r_squared < LEAST_R_SQUARED:
        return f"the fit explains too little (R² {fit.r_squared:.2f})"
    if math.isnan(fit.width_error):
        return "the fit's error is not known (too few sequences)"
    if 2 * 1.96 * fit.width_error >= fit.width_tokens:
        return f"the fit is too uncertain (W = {fit.width_tokens:.0f} ± {fit.width_error:.0f} tokens)"
    return ""


def curve_fit(curve: DecayCurve) -> DecayFit | None:
    """The fit, or None where too little of the curve stands out of its noise."""
    try:
        return fit_decay(curve)
    except ValueError:
        return None


def listed(reaches: Sequence[Reach]) -> str:
    """The lengths in words, those that only the fit speaks of apart."""

    def words(lengths: list[int]) -> str:
        return f"{lengths[0]}" if len(lengths) == 1 else f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"

    measured = [one.length for one in reaches if one.measured]
    fitted = [one.length for one in reaches if not one.measured]
    parts = [f"at {words(measured)} tokens (measured)"] if measured else []
    parts += [f"at {words(fitted)} tokens (by the fit, beyond what was measured)"] if fitted else []
    return ", and ".join(parts)
