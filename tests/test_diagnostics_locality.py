"""The locality report: widths side by side, and the lengths that training will not reinforce."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeguard.diagnostics.decay_fit import DecayCurve, DecayFit
from routeguard.diagnostics.gradient import GradientLocality
from routeguard.diagnostics.locality import LocalityReport, locality, packed
from routeguard.diagnostics.reach import Reach, fit_weakness, reach
from tests.attention_reference import sharpened
from tests.test_diagnostics_autocorrelation import chain
from tests.zoo.build import build

DOCUMENTS = [[10 + token for token in chain(1500, 6.0, seed=seed)] for seed in range(4)]


def exponential(width: float, lags: int) -> DecayCurve:
    steps = np.arange(lags)
    return DecayCurve(steps, np.tile(np.exp(-steps / width), (3, 1)), np.ones((3, lags)), np.zeros(lags))


def judged(curve: DecayCurve, lengths: tuple[int, ...]) -> LocalityReport:
    """A report on a gradient of this curve."""
    gradient = GradientLocality({0: curve}, len(curve.lags), len(curve.sums), 8, 1.0)
    data = locality(DOCUMENTS, max_lag=8, lengths=(4,)).data
    return LocalityReport(data, gradient, tuple(reach(curve, length) for length in lengths))


def test_lengths_are_read_off_the_curve_and_beyond_it_off_the_fit() -> None:
    curve = exponential(20.0, 200)
    inside, outside = reach(curve, 40), reach(curve, 400)
    assert inside.measured and inside.share == pytest.approx(math.exp(-(40 - 16.5) / 20), rel=0.05)
    assert not outside.measured and outside.share == pytest.approx(math.exp(-(400 - 16.5) / 20), rel=1e-2)


def test_the_curve_decides_where_it_is_not_exponential() -> None:
    steps = np.arange(200)
    heavy = np.exp(-steps / 5) + 0.2  # falls fast, then stays
    curve = DecayCurve(steps, np.tile(heavy, (3, 1)), np.ones((3, 200)), np.zeros(200))
    assert reach(curve, 150).share == pytest.approx(0.2 / np.median(heavy[1:33]), rel=0.01)


def test_a_curve_that_does_not_fall_says_nothing_beyond_what_was_measured() -> None:
    flat = DecayCurve(np.arange(200), np.tile(1 + np.arange(200) / 1000, (3, 1)), np.ones((3, 200)), np.zeros(200))
    assert reach(flat, 150).share == pytest.approx(1.15, rel=0.05)
    assert math.isnan(reach(flat, 100_000).share)


def test_a_text_that_never_repeats_a_token_at_once() -> None:
    steps = np.arange(1, 200)
    values = np.exp(-steps / 30)
    values[0], values[4] = -0.5, 50.0
    curve = DecayCurve(steps, np.tile(values, (3, 1)), np.ones((3, 199)), np.zeros(199))
    assert reach(curve, 60).share == pytest.approx(math.exp(-(60 - 16.5) / 30), rel=0.1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, ""),
        ({"r_squared": 0.34}, "explains too little (R² 0.34)"),
        ({"width_error": 26.0}, "too uncertain (W = 100 ± 26 tokens)"),
        ({"width_error": math.nan}, "error is not known"),
        ({"width_tokens": math.inf}, "no fall was seen"),
    ],
)
def test_what_speaks_against_a_fit(changed: dict[str, float], message: str) -> None:
    good = DecayFit(1.0, 100.0, 25.0, 1, 200, 0.9)
    found = fit_weakness(replace(good, **changed))  # type: ignore[arg-type]
    assert message in found if message else found == ""
    assert fit_weakness(None) == "nothing could be fitted"


def test_a_poor_fit_says_nothing_beyond_what_was_measured() -> None:
    steps = np.arange(200)
    noisy = np.exp(-steps / 100 + 3 * np.sin(steps))
    curve = DecayCurve(steps, np.tile(noisy, (3, 1)), np.ones((3, 200)), np.zeros(200))
    assert reach(curve, 150).measured and math.isnan(reach(curve, 2000).share)
    report = judged(curve, (150, 2000))
    assert report.reinforced == (150,) and report.unknown == (2000,) and report.unreinforced == ()
    assert "unknown at 2000 tokens: beyond what was measured, and the fit explains too little (R² 0." in str(report)


def test_the_fit_lifts_nothing_above_the_end_of_what_was_measured() -> None:
    steps = np.arange(200)
    values = np.where(steps < 170, np.exp(-steps / 100), 0.005 * np.exp(-steps / 100))
    curve = DecayCurve(steps, np.tile(values, (3, 1)), np.ones((3, 200)), np.zeros(200))
    end, beyond = reach(curve, 199), reach(curve, 205)
    assert end.measured and not beyond.measured
    assert beyond.share == end.share < 0.01


def test_without_a_model_there_is_no_verdict() -> None:
    report = locality(DOCUMENTS, max_lag=64, lengths=(4, 16, 50, 1000), threshold=0.9)
    assert report.gradient is None and report.gradient_width is None
    assert report.data_width is not None and report.data_width.width_tokens == pytest.approx(6, rel=0.25)
    assert report.reaches[2].share < report.threshold and math.isnan(report.reaches[3].share)
    assert report.unknown == (4, 16, 50, 1000) and report.reinforced == report.unreinforced == ()
    assert {one["verdict"] for one in report.to_dict()["reaches"]} == {"unknown"}
    text = str(report)
    assert "needs the model" in text and "1000 tokens  not measured" in text
    assert "hardly" not in text and "training on this data" not in text


def test_report_with_a_model(tmp_path: Path) -> None:
    model = sharpened(build("lfm2"))
    report = locality(DOCUMENTS, model=model, max_lag=64, sequence_tokens=64, num_sequences=3, lengths=(8, 32))
    assert isinstance(report.gradient, GradientLocality)
    assert (report.gradient.num_sequences, report.gradient.num_tokens) == (3, 64)
    data = report.to_dict()
    assert data["W_data"]["width_tokens"] > 0 and len(data["gradient"]["pooled"]["values"]) == 64
    assert [reach["length"] for reach in data["reaches"]] == [8, 32]
    report.plot(tmp_path / "both.png")
    assert (tmp_path / "both.png").exists()


def test_labels_reach_the_gradient() -> None:
    model, options = sharpened(build("lfm2")), {"max_lag": 8, "sequence_tokens": 32, "num_sequences": 2}
    ends = [[-100] * len(document) for document in DOCUMENTS]
    with pytest.raises(ValueError, match="no label of a sequence counts"):
        locality(DOCUMENTS, model=model, labels=ends, **options)
    with pytest.raises(ValueError, match="a label for each token"):
        locality(DOCUMENTS, model=model, labels=ends[1:], **options)


def test_verdict_follows_the_threshold_and_says_what_it_rests_on() -> None:
    reaches = (Reach(100, 0.5, True), Reach(200, 0.02, True), Reach(300, 0.005, True), Reach(400, 0.001, False))
    stated = replace(judged(exponential(20.0, 200), (4,)), reaches=reaches)
    assert (stated.reinforced, stated.unreinforced) == ((100, 200), (300, 400))
    assert replace(stated, threshold=0.05).unreinforced == (200, 300, 400)
    fitted = "at 400 tokens (by the fit, beyond what was measured)"
    assert str(stated).endswith(
        "training on this data reinforces attention at 100 and 200 tokens (measured)\n"
        f"training on this data will hardly reinforce attention at 300 tokens (measured), and {fitted}"
    )
    raised = replace(stated, threshold=0.0001)
    assert str(raised).endswith(f"reinforces attention at 100, 200 and 300 tokens (measured), and {fitted}")
    assert [one["verdict"] for one in stated.to_dict()["reaches"]] == ["reinforced"] * 2 + ["hardly reinforced"] * 2


def test_a_length_that_nothing_reaches_is_unknown() -> None:
    report = judged(exponential(20.0, 6), (4, 512, 100000))
    assert report.gradient_width is None and report.reinforced == (4,) and report.unknown == (512, 100000)
    assert str(report).endswith("unknown at 512, 100000 tokens: beyond what was measured, and nothing could be fitted")
    assert report.to_dict()["unknown"] == [512, 100000]


@pytest.mark.parametrize("options", [{"lengths": ()}, {"lengths": (0,)}, {"threshold": 1.5}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give lengths of 1 or more"):
        locality(DOCUMENTS, **options)


def test_packing_spreads_over_the_data() -> None:
    rows, labels, unlabelled = packed([list(range(10)), list(range(10, 20))], 4, 2)
    assert rows.tolist() == labels.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]] and unlabelled == 0
    assert packed([list(range(9))], 4, 50)[0].shape == (2, 4)
    with pytest.raises(ValueError, match="ask for shorter"):
        packed([[1, 2]], 4, 1)


def test_sequences_without_a_label_that_counts_are_left_out() -> None:
    labels = [-100] * 4 + [4, -100, -100, -100] + [-100, 9, 10, 11] + [-100] * 3 + [15]
    rows, targets, unlabelled = packed([list(range(16))], 4, 2, labels=[labels])
    assert rows.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]] and unlabelled == 2
    assert targets.tolist() == [[-100, 9, 10, 11], [-100, -100, -100, 15]]
    model, options = sharpened(build("lfm2")), {"max_lag": 8, "sequence_tokens": 32, "num_sequences": 8}
    ends = [[-100] * (len(document) - 1) + [document[-1]] for document in DOCUMENTS]
    report = locality(DOCUMENTS, model=model, labels=ends, lengths=(8,), **options)
    assert report.gradient is not None and report.gradient.num_sequences == 3
    assert report.unlabelled == report.to_dict()["unlabelled_sequences"] == sum(map(len, DOCUMENTS)) // 32 - 3
    assert f"{report.unlabelled} sequences of the data with no label that counts" in str(report)
