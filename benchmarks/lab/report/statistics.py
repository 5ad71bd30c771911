"""Means with intervals, paired differences and correlations of a handful of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_NORMAL = 1.960


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: the mean.
        half_width: half of its 95 % interval (Student's t); None from fewer than three seeds, which say too little.
        count: number of seeds.
    """

    mean: float
    half_width: float | None
    count: int

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.half_width is not None and self.mean - self.half_width > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.half_width is not None and self.mean + self.half_width < 0

    def text(self, *, signed: bool = False) -> str:
        """`0.64 ± 0.05`, with a sign if asked for."""
        mean = f"{self.mean:+.2f}" if signed else f"{self.mean:.2f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:.2f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of values that are independent of each other. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    if len(values) < 3:
        return Estimate(fmean(values), None, len(values))
    degrees = len(values) - 1
    quantile = _T[degrees - 1] if degrees <= len(_T) else _T_NORMAL
    return Estimate(fmean(values), quantile * stdev(values) / sqrt(len(values)), len(values))


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation. Raises ValueError for fewer than three pairs or values that are all the same."""
    if len(x) != len(y) or len(x) < 3:
        raise ValueError(f"a correlation needs at least three pairs; got {len(x)} and {len(y)} values")
    mean_x, mean_y = fmean(x), fmean(y)
    spread = sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))
    if not spread:
        raise ValueError("values that are all the same have no correlation")
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's correlation: Pearson's, of ranks; equal values share their mean rank."""
    return correlation(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first: dict[float, int] = {}
    count: dict[float, int] = {}
    for place, value in enumerate(order):
        first.setdefault(value, place)
        count[value] = count.get(value, 0) + 1
    return [first[value] + (count[value] - 1) / 2 for value in values]
