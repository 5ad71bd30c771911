"""Token autocorrelation against counts by hand, chains with known answers, and the errors of the fit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from routeguard.diagnostics.autocorrelation import token_autocorrelation
from routeguard.diagnostics.decay_fit import DecayCurve, fit_decay


def by_hand(documents: Sequence[Sequence[int]], lag: int) -> tuple[float, float]:
    """Both normalisations from the definitions, token by token."""
    flat = [token for document in documents for token in document]
    share = {token: flat.count(token) / len(flat) for token in set(flat)}
    pairs = [(d[t], d[t + lag]) for d in documents for t in range(len(d) - lag)]
    above = below = 0.0
    for token, pi in share.items():
        products = [((x == token) - pi) * ((y == token) - pi) for x, y in pairs]
        above += pi * sum(products) / len(products)
        below += pi * (pi * (1 - pi) ** 2 + (1 - pi) * pi**2)
    conditional = weight = 0.0
    for token, pi in share.items():
        following = [y for x, y in pairs if x == token]
        if following:
            conditional += pi * (following.count(token) / len(following) - pi) / (1 - pi)
            weight += pi
    return above / below, conditional / weight


@pytest.mark.parametrize(
    "documents",
    [
        [[1, 1, 2, 1, 3, 3, 1, 2]],
        [[5, 6, 5, 6, 5, 6], [6, 6, 5], [7, 5, 5, 5]],
        [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [9], []],
    ],
)
def test_counts_by_hand(documents: list[list[int]]) -> None:
    measured = token_autocorrelation(documents, max_lag=5, num_groups=2)
    used = [document for document in documents if len(document) > 1]
    for number, lag in enumerate(measured.covariance.lags):
        covariance, conditional = by_hand(used, int(lag))
        assert measured.covariance.values[number] == pytest.approx(covariance)
        assert measured.conditional.values[number] == pytest.approx(conditional)
    assert measured.num_tokens == sum(map(len, used)) and measured.num_documents == len(used)


def test_one_small_case_written_out() -> None:
    # a b a b: at lag 2 every token comes again, at lag 1 never.
    measured = token_autocorrelation([[1, 2, 1, 2]], max_lag=2)
    assert measured.covariance.values.tolist() == pytest.approx([-1, 1])
    assert measured.conditional.values.tolist() == pytest.approx([-1, 1])


def chain(num_tokens: int, width: float, seed: int, vocabulary: int = 6) -> list[int]:
    """Keeps its token with probability exp(−1/width), else draws any: autocorrelation exactly exp(−τ/width)."""
    rng, token, out = random.Random(seed), 0, []
    for _ in range(num_tokens):
        token = token if rng.random() < math.exp(-1 / width) else rng.randrange(vocabulary)
        out.append(token)
    return out


@pytest.mark.parametrize("normalisation", ["covariance", "conditional"])
def test_width_of_a_chain_with_a_known_one(normalisation: str) -> None:
    measured = token_autocorrelation([chain(50_000, 20.0, seed=1)], max_lag=100)
    fit = measured.fit(normalisation)  # type: ignore[arg-type]
    assert 0 < fit.width_error < 3 and abs(fit.width_tokens - 20) < 2.5 * fit.width_error
    assert fit.scale == pytest.approx(1, rel=0.1) and fit.r_squared > 0.95
    assert measured.fit("covariance").last_lag < 100  # it ends where noise begins


def test_the_error_of_the_width_is_about_right() -> None:
    fits = [token_autocorrelation([chain(6000, 8.0, seed=seed)], max_lag=24).fit() for seed in range(40)]
    widths = np.array([fit.width_tokens for fit in fits])
    stated = float(np.mean([fit.width_error for fit in fits]))
    assert 0.6 < stated / widths.std() < 1.6
    covered = np.mean([abs(fit.width_tokens - 8) < 2 * fit.width_error for fit in fits])
    assert covered > 0.8


def test_unrelated_tokens_have_none() -> None:
    rng = random.Random(0)
    measured = token_autocorrelation([[rng.randrange(50) for _ in range(50_000)]], max_lag=20)
    assert np.abs(measured.covariance.values).max() < 0.02
    assert np.abs(measured.conditional.values).max() < 0.02
    with pytest.raises(ValueError, match="give more data"):
        measured.fit()
    assert "no fit" in str(measured)


def test_documents_are_sampled_whole_and_pairs_stay_inside_them() -> None:
    documents = [[n, n] for n in range(300)]
    measured = token_autocorrelation(documents, max_lag=4, max_tokens=100)
    assert (measured.num_tokens, measured.num_documents, measured.num_documents_given) == (100, 50, 300)
    assert measured.covariance.lags.tolist() == [1]
    assert measured.conditional.values[0] == pytest.approx(1)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="none of the 2 documents has two tokens"):
        token_autocorrelation([[1], []])
    with pytest.raises(ValueError, match="one token, 7, over and over"):
        token_autocorrelation([[7, 7, 7]])
    with pytest.raises(ValueError, match="at least 1 lag"):
        token_autocorrelation([[1, 2]], max_lag=0)
    with pytest.raises(ValueError, match="unknown normalisation"):
        token_autocorrelation([[1, 2]]).curve("other")  # type: ignore[arg-type]


def test_fit_recovers_an_exact_exponential() -> None:
    lags = np.arange(1, 41)
    values = 3 * np.exp(-lags / 15)
    curve = DecayCurve(lags, np.stack([values, values]), np.ones((2, 40)), np.zeros(40))
    fit = fit_decay(curve)
    assert (fit.scale, fit.width_tokens) == pytest.approx((3, 15)) and fit.width_error == pytest.approx(0, abs=1e-9)
    assert fit.at(15) == pytest.approx(3 / math.e)
    narrowed = fit_decay(curve, first_lag=5, last_lag=20)
    assert (narrowed.first_lag, narrowed.last_lag) == (5, 20)
    holes = values.copy()
    holes[[0, 5, 6]] = -1.0  # no token follows itself, say
    fit = fit_decay(DecayCurve(lags, np.stack([holes, holes]), np.ones((2, 40)), np.zeros(40)))
    assert fit.width_tokens == pytest.approx(15) and (fit.first_lag, fit.last_lag) == (2, 40)
    flat = fit_decay(DecayCurve(lags, np.ones((2, 40)), np.ones((2, 40)), np.zeros(40)))
    assert math.isinf(flat.width_tokens) and "does not fall" in str(flat)
