"""Confidence intervals of accuracies."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


def wilson(mean: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a mean of `count` scores between 0 and 1.

    Exact in form for scores that are 0 or 1. For shares in between it is at least as wide as needed, because their
    variance is at most `mean * (1 - mean)` (derived: E[x²] <= E[x]).

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927). Raises ValueError for no scores or a mean outside 0 to 1.
    """
    if count < 1 or not -1e-9 <= mean <= 1 + 1e-9:
        raise ValueError(f"an interval needs at least one score and a mean from 0 to 1; got {mean} of {count}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(max(mean * (1 - mean), 0.0) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
