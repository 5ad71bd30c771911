"""How local is a text? Autocorrelation of its tokens over distance, in both normalisations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from routeguard.diagnostics.decay_fit import Array, DecayCurve, DecayFit, fit_decay
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Normalisation = Literal["covariance", "conditional"]

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, eq=False)
class TokenAutocorrelation:
    """Autocorrelation of tokens at each lag.

    Attributes:
        covariance: normalisation (a), `Σ_v π_v·E[f_v(x_t)·f_v(x_{t+τ})] / Σ_v π_v·E[f_v²]`, `f_v = 1[x = v] − π_v`.
        conditional: normalisation (b), `Σ_v π_v·(P(x_{t+τ} = v | x_t = v) − π_v)/(1 − π_v)`, over the tokens that occur
            as the first of a pair.
        num_tokens, num_documents: what was counted.
        num_documents_given: what was given; more than `num_documents` where only a sample was counted.
    """

    covariance: DecayCurve
    conditional: DecayCurve
    num_tokens: int
    num_documents: int
    num_documents_given: int

    def fit(self, normalisation: Normalisation = "covariance") -> DecayFit:
        """Log-linear fit of one of the two curves; ValueError where too little of it stands out of the noise."""
        return fit_decay(self.curve(normalisation))

    def curve(self, normalisation: Normalisation) -> DecayCurve:
        if normalisation not in ("covariance", "conditional"):
            raise ValueError(f"unknown normalisation {normalisation!r}; known: covariance, conditional")
        return self.covariance if normalisation == "covariance" else self.conditional

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "num_documents_given": self.num_documents_given,
            "lags": self.covariance.lags.tolist(),
            **{
                name: {
                    "values": self.curve(name).values.tolist(),
                    "errors": self.curve(name).errors.tolist(),
                    "fit": fit_or_reason(self.curve(name))[1],
                }
                for name in ("covariance", "conditional")
            },
        }

    def __str__(self) -> str:
        part = "" if self.num_documents == self.num_documents_given else f" of {self.num_documents_given}"
        lines = [f"token autocorrelation, {self.num_tokens} tokens in {self.num_documents}{part} documents"]
        for name, letter in (("covariance", "a"), ("conditional", "b")):
            lines.append(f"  ({letter}) {name:<12} {fit_or_reason(self.curve(name))[0]}")  # type: ignore[arg-type]
        return "\n".join(lines)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """Both curves with their fits; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.diagnostics.locality_plot import plot_autocorrelation

        return plot_autocorrelation(self, path)


def token_autocorrelation(
    documents: Sequence[Sequence[int]],
    *,
    max_lag: int = 512,
    num_groups: int = 20,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
) -> TokenAutocorrelation:
    """Measure how much a token says about the same token some distance on.

    Pairs never reach over the end of a document. Time grows with `tokens · max_lag`.

    Args:
        documents: token ids of each sample.
        max_lag: largest distance in tokens, default 512.
        num_groups: stretches of the data whose differences tell the errors, default 20.
        max_tokens: whole documents are drawn at random until there are this many tokens, default a million.
        seed: of that draw.

    Raises:
        ValueError: no document with two tokens, a single token throughout, a lag or number of groups below the least.

    Source: paper, token autocorrelation weighted by frequency; its normalisation is not known, so both are here.
    """
    if max_lag < 1 or num_groups < 2:
        raise ValueError(f"max_lag={max_lag}, num_groups={num_groups}: give at least 1 lag and 2 groups")
    usable = [np.asarray(document, dtype=np.int64) for document in documents if len(document) > 1]
    if not usable:
        raise ValueError(f"none of the {len(documents)} documents has two tokens")
    chosen = _sampled(usable, max_tokens, seed)
    longest = max(len(document) for document in chosen)
    tokens, ids = np.unique(np.concatenate(chosen), return_inverse=True)
    if len(tokens) == 1:
        raise ValueError(f"the data is one token, {int(tokens[0])}, over and over: it has no autocorrelation")
    owner = np.repeat(np.arange(len(chosen)), [len(document) for document in chosen])
    frequency = np.bincount(ids) / len(ids)
    lags = np.arange(1, min(max_lag, longest - 1) + 1)
    num_groups = min(num_groups, len(ids) // 2)
    edges = np.linspace(0, len(ids), num_groups + 1).astype(np.int64)[:-1]
    shape = (num_groups, len(lags))
    counts, covariance, conditional = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    offset = np.zeros(len(lags))
    squares, cubes = np.square(frequency), float((frequency**3).sum())
    weight = frequency[ids]
    for number, lag in enumerate(lags):
        pairs = owner[:-lag] == owner[lag:]
        same = pairs & (ids[:-lag] == ids[lag:])
        starts = np.bincount(ids[:-lag][pairs], minlength=len(tokens))
        terms = np.where(same, weight[:-lag], 0.0) - squares[ids[:-lag]] - squares[ids[lag:]] + cubes
        covariance[:, number] = _by_group(np.where(pairs, terms, 0.0), edges)
        counts[:, number] = _by_group(pairs.astype(np.float64), edges)
        # P(v again | v) is a sum over pairs of 1/starts; times the number of pairs, as the curve is a mean over pairs.
        present = starts > 0
        total = frequency[present].sum()
        chance = frequency / (1 - frequency) / np.maximum(starts, 1) / total
        conditional[:, number] = _by_group(np.where(same, chance[ids[:-lag]], 0.0), edges) * pairs.sum()
        offset[number] = -(squares[present] / (1 - frequency[present])).sum() / total
    variance = float(squares.sum() - cubes)
    return TokenAutocorrelation(
        covariance=DecayCurve(lags, covariance / variance, counts, np.zeros(len(lags))),
        conditional=DecayCurve(lags, conditional, counts, offset),
        num_tokens=len(ids),
        num_documents=len(chosen),
        num_documents_given=len(documents),
    )


def fit_or_reason(curve: DecayCurve) -> tuple[str, dict[str, Any] | None]:
    """The fit as text and as data, or the reason why there is none and None."""
    try:
        fit = fit_decay(curve)
    except ValueError as error:
        return f"no fit: {error}", None
    return str(fit), vars(fit)


def _sampled(documents: list[NDArray[np.int64]], max_tokens: int, seed: int) -> list[NDArray[np.int64]]:
    order = list(range(len(documents)))
    if sum(map(len, documents)) > max_tokens:
        random.Random(seed).shuffle(order)
    chosen: list[NDArray[np.int64]] = []
    total = 0
    for number in order:
        if chosen and total + len(documents[number]) > max_tokens:
            break
        chosen.append(documents[number][:max_tokens])
        total += len(documents[number])
    return chosen


def _by_group(terms: Array, edges: NDArray[np.int64]) -> Array:
    """Sums over stretches that begin at `edges`; a stretch beyond the end of `terms` is empty."""
    padded = np.concatenate([terms, np.zeros(max(0, int(edges[-1]) + 1 - len(terms)))])
    sums: Array = np.add.reduceat(padded, edges)
    return sums
