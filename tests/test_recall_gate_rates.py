"""How often the gate fails by luck, how often it finds a real drop, and the two tests behind it."""

from __future__ import annotations

import math
from functools import cache

import numpy
import pytest

from routeguard import gate
from routeguard.recall.gate import GateRow
from routeguard.recall.paired import fewest_losses, paired_bootstrap, sign_test
from tests.test_recall_gate import result

LENGTHS = 3


@cache
def judged(count: int, lost: int, gained: int) -> GateRow:
    """The gate's row for a length where that many samples are lost and gained; the others are right twice."""
    same = [1.0] * (count - lost - gained)
    before = result({4096: [1.0] * lost + [0.0] * gained + same})
    after = result({4096: [0.0] * lost + [1.0] * gained + same})
    return gate(before, after, num_resamples=1000).rows[0]


def bootstrap_only(row: GateRow) -> bool:
    return row.drop >= 0.10 - 1e-9 and row.p_bootstrap <= 0.05 + 1e-9


def both(row: GateRow) -> bool:
    return row.failed


def rate(verdict, count: int, lost: float, gained: float, lengths: int, trials: int = 3000) -> float:
    """The share of simulated gates in which any length fails."""
    shares = [lost, gained, 1 - lost - gained]
    drawn = numpy.random.default_rng(0).multinomial(count, shares, (trials, lengths))
    failed = [
        # A drop of less than ten points never fails; asking would only take time.
        any(10 * (a - b) >= count and verdict(judged(count, int(a), int(b))) for a, b, _ in trial)
        for trial in drawn
    ]
    return sum(failed) / trials


@pytest.mark.parametrize("count", [20, 50, 200])
@pytest.mark.parametrize("change", [0.05, 0.10, 0.16])
def test_false_alarms_where_nothing_fell(count: int, change: float) -> None:
    """As many are lost as gained: a length fails in at most 5 % of the gates, one of three in at most 10 %."""
    assert rate(both, count, change, change, 1) <= 0.05
    assert rate(both, count, change, change, LENGTHS) <= 0.10


def test_a_bootstrap_alone_would_cry_wolf() -> None:
    """The control: what the sign test is there for."""
    assert rate(bootstrap_only, 20, 0.10, 0.10, LENGTHS) > 0.12
    assert rate(both, 20, 0.10, 0.10, LENGTHS) < 0.05


@pytest.mark.parametrize(
    ("count", "drop", "low", "high"),
    [  # the table of docs/recall.md, with 3 % gained as well
        (20, 0.20, 0.30, 0.40),
        (50, 0.20, 0.80, 0.90),
        (100, 0.20, 0.97, 1.00),
        (50, 0.15, 0.60, 0.73),
        (100, 0.15, 0.85, 0.93),
        (200, 0.10, 0.45, 0.60),  # as many below ten points as above, whatever the count
    ],
)
def test_real_drops_are_found_as_often_as_the_docs_say(count: int, drop: float, low: float, high: float) -> None:
    assert low <= rate(both, count, drop + 0.03, 0.03, 1, trials=1500) <= high


def test_three_of_twenty_are_no_proof() -> None:
    row = judged(20, 3, 0)
    assert row.drop == pytest.approx(0.15) and bootstrap_only(row)
    assert row.p_sign == 0.125 and not row.failed
    assert not judged(20, 4, 0).failed and judged(20, 5, 0).failed
    report = gate(result({4096: [1.0] * 20}), result({4096: [1.0] * 17 + [0.0] * 3}), num_resamples=1000)
    assert report.ok and "0.125" in str(report) and report.to_dict()["rows"][0]["p_sign"] == 0.125
    assert "of 20 samples at least 5 must be lost before that is significant, which is 25 points" in str(report)
    assert "measure at least 50 a length" in str(report)
    enough = gate(result({4096: [1.0] * 50}), result({4096: [1.0] * 45 + [0.0] * 5}))
    assert not enough.ok and "note:" not in str(enough)


def test_the_bootstrap_counts_too() -> None:
    """Many small losses, one large gain: the sign test alone would fail it."""
    before = result({4096: [0.5] * 29 + [0.0]})
    after = result({4096: [0.36] * 29 + [1.0]})
    row = gate(before, after).rows[0]
    assert row.drop >= 0.10 and row.p_sign < 1e-6 and row.num_lost == 29 and row.num_gained == 1
    assert row.p_bootstrap <= 0.05 and row.failed
    wild = gate(result({4096: [0.9] * 25 + [0.0] * 5}), result({4096: [0.62] * 25 + [0.8] * 5})).rows[0]
    assert wild.drop == pytest.approx(0.1) and wild.p_sign < 0.001 and wild.p_bootstrap > 0.05 and not wild.failed


def test_the_sign_test_is_the_binomial_tail() -> None:
    for lost in range(9):
        for gained in range(9):
            n = lost + gained
            tail = sum(math.comb(n, k) for k in range(lost, n + 1)) / 2**n
            assert sign_test(lost, gained) == pytest.approx(tail, rel=1e-12)
    assert sign_test(0, 0) == 1.0 and 0 < sign_test(3000, 2900) < 0.2  # no overflow
    for confidence in (0.9, 0.95, 0.99, 0.5 + 1e-6):
        needed = fewest_losses(confidence)
        assert sign_test(needed, 0) <= 1 - confidence < sign_test(needed - 1, 0)


def test_the_bootstrap_finds_the_binomial_share() -> None:
    """Three lost of twenty: no drop is drawn with a chance of (17/20)^20."""
    drops = numpy.array([1.0] * 3 + [0.0] * 17)
    found = paired_bootstrap(drops, confidence=0.95, num_resamples=20_000, seed=1)
    assert found.p == pytest.approx(0.85**20, abs=0.004) and (found.low, found.high) == (0.05, 0.3)
