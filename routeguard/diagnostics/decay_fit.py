"""Fit `y = C·exp(−τ/W)` to a curve over distance, with the error of W from groups of data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routeguard.routes.wording import as_printed

Array = NDArray[np.float64]

MIN_LAGS = 8
NOISE_ERRORS = 3.0  # a value stands out of the noise if it is this many standard errors above zero
NOISE_LAGS = 10  # a curve ends where so many lags in a row do not


@dataclass(frozen=True)
class DecayFit:
    """A log-linear fit.

    Attributes:
        scale: C.
        width_tokens: W, the distance over which the curve falls to 1/e; infinite where it does not fall.
        width_error: standard error of W by the jackknife over groups of data; nan with fewer than two groups.
        first_lag, last_lag: the lags fitted, positive values only; the last is where the curve meets its own noise.
        r_squared: share of the variance of log y that the line explains, 0 to 1.
    """

    scale: float
    width_tokens: float
    width_error: float
    first_lag: int
    last_lag: int
    r_squared: float

    def at(self, lag: float) -> float:
        """The fitted curve at a lag."""
        return self.scale * math.exp(-lag / self.width_tokens)

    def __str__(self) -> str:
        if math.isinf(self.width_tokens):
            return f"does not fall over lags {self.first_lag} to {self.last_lag}"
        error = "" if math.isnan(self.width_error) else f" ± {self.width_error:.0f}"
        return (
            f"W = {self.width_tokens:.0f}{error} tokens (lags {self.first_lag} to {self.last_lag}, "
            f"R² {self.r_squared:.2f})"
        )

    _repr_pretty_ = as_printed


@dataclass(frozen=True, eq=False)
class DecayCurve:
    """A curve over distance as a ratio of sums, kept for each group of data so that errors can be told.

    Attributes:
        lags: [n] distances in tokens, ascending.
        sums, counts: [groups, n]; the curve is the sum over groups of `sums` by that of `counts`.
        offset: [n] added to the ratio.
    """

    lags: NDArray[np.int64]
    sums: Array
    counts: Array
    offset: Array

    @property
    def values(self) -> Array:
        """[n] the curve."""
        return self._ratio(self.sums.sum(0), self.counts.sum(0))

    @property
    def leave_one_out(self) -> Array:
        """[groups, n] the curve without each group in turn."""
        return self._ratio(self.sums.sum(0) - self.sums, self.counts.sum(0) - self.counts)

    @property
    def errors(self) -> Array:
        """[n] standard errors by the jackknife; nan with fewer than two groups."""
        groups = len(self.sums)
        if groups < 2:
            return np.full(len(self.lags), np.nan)
        without = self.leave_one_out
        spread: Array = np.sqrt((groups - 1) / groups * np.square(without - without.mean(0)).sum(0))
        return spread

    def _ratio(self, sums: Array, counts: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio: Array = sums / counts + self.offset
        return ratio


def fit_decay(curve: DecayCurve, *, first_lag: int = 1, last_lag: int | None = None) -> DecayFit:
    """Fit a curve by linear regression of its logarithm on the lag.

    Args:
        curve: what to fit.
        first_lag: first lag of the fit, default 1.
        last_lag: last lag of the fit. Default: the last that is three standard errors above zero before ten in a row
            that are not.

    Raises:
        ValueError: fewer than eight lags with positive values in that range.

    Source: paper, log-linear regression; the end at the noise and the jackknife are ours.
    """
    values, errors = curve.values, np.nan_to_num(curve.errors)
    clear = (curve.lags >= first_lag) & (values > np.maximum(NOISE_ERRORS * errors, 0))
    numbers = np.flatnonzero((curve.lags >= first_lag) & (curve.lags <= (last_lag or curve.lags[-1])))
    if last_lag is None:
        numbers = numbers[numbers <= _end(np.flatnonzero(clear))]
    numbers = numbers[values[numbers] > 0]
    if len(numbers) < MIN_LAGS:
        raise ValueError(
            f"the curve stands out of its noise at {len(numbers)} lags from {first_lag} on, a fit needs {MIN_LAGS}; "
            "give more data"
        )
    lags = curve.lags[numbers].astype(np.float64)
    slope, intercept, r_squared = _line(lags, np.log(values[numbers]))
    width = -1 / slope if slope < 0 else math.inf
    return DecayFit(
        scale=math.exp(intercept),
        width_tokens=width,
        width_error=_width_error(curve, numbers, lags, width),
        first_lag=int(lags[0]),
        last_lag=int(lags[-1]),
        r_squared=r_squared,
    )


def _end(clear: NDArray[np.intp]) -> int:
    """The last of the numbers before a gap of `NOISE_LAGS` (before any if there are none: −1)."""
    if not len(clear):
        return -1
    gaps = np.flatnonzero(np.diff(clear) > NOISE_LAGS)
    return int(clear[gaps[0]] if len(gaps) else clear[-1])


def _width_error(curve: DecayCurve, numbers: NDArray[np.intp], lags: Array, width: float) -> float:
    groups = len(curve.sums)
    if groups < 2 or math.isinf(width):
        return math.nan
    slopes = []
    for without in curve.leave_one_out:
        kept = without[numbers] > 0
        if kept.sum() >= 2:
            slopes.append(_line(lags[kept], np.log(without[numbers][kept]))[0])
    spread = np.array(slopes)
    error = math.sqrt((groups - 1) / groups * float(np.square(spread - spread.mean()).sum()))
    return width**2 * error


def _line(x: Array, y: Array) -> tuple[float, float, float]:
    """Slope, intercept and R² of a least-squares line."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    left = float(np.square(dy - slope * dx).sum())
    total = float(dy @ dy)
    return slope, float(y.mean() - slope * x.mean()), 1 - left / total if total > 0 else 1.0
