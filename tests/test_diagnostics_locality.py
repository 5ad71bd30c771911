"""The locality report: widths side by side, and the lengths that training will not reinforce."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeguard.diagnostics.decay_fit import DecayCurve
from routeguard.diagnostics.gradient import GradientLocality
from routeguard.diagnostics.locality import LocalityReport, Reach, _reach, locality, packed
from tests.attention_reference import sharpened
from tests.test_diagnostics_autocorrelation import chain
from tests.zoo.build import build

DOCUMENTS = [[10 + token for token in chain(1500, 6.0, seed=seed)] for seed in range(4)]


def exponential(width: float, lags: int) -> DecayCurve:
    steps = np.arange(lags)
    return DecayCurve(steps, np.tile(np.exp(-steps / width), (3, 1)), np.ones((3, lags)), np.zeros(lags))


def test_lengths_are_read_off_the_curve_and_beyond_it_off_the_fit() -> None:
    curve = exponential(20.0, 200)
    inside, outside = _reach(curve, 40), _reach(curve, 400)
    assert inside.measured and inside.share == pytest.approx(math.exp(-(40 - 16.5) / 20), rel=0.05)
    assert not outside.measured and outside.share == pytest.approx(math.exp(-(400 - 16.5) / 20), rel=1e-2)


def test_the_curve_decides_where_it_is_not_exponential() -> None:
    steps = np.arange(200)
    heavy = np.exp(-steps / 5) + 0.2  # falls fast, then stays
    curve = DecayCurve(steps, np.tile(heavy, (3, 1)), np.ones((3, 200)), np.zeros(200))
    assert _reach(curve, 150).share == pytest.approx(0.2 / np.median(heavy[1:33]), rel=0.01)


def test_a_curve_that_does_not_fall_says_nothing_beyond_what_was_measured() -> None:
    flat = DecayCurve(np.arange(200), np.tile(1 + np.arange(200) / 1000, (3, 1)), np.ones((3, 200)), np.zeros(200))
    assert _reach(flat, 150).share == pytest.approx(1.15, rel=0.05)
    assert math.isnan(_reach(flat, 100_000).share)


def test_a_text_that_never_repeats_a_token_at_once() -> None:
    steps = np.arange(1, 200)
    values = np.exp(-steps / 30)
    values[0], values[4] = -0.5, 50.0
    curve = DecayCurve(steps, np.tile(values, (3, 1)), np.ones((3, 199)), np.zeros(199))
    assert _reach(curve, 60).share == pytest.approx(math.exp(-(60 - 16.5) / 30), rel=0.1)


def test_report_without_a_model() -> None:
    report = locality(DOCUMENTS, max_lag=64, lengths=(4, 16, 1000))
    assert report.gradient is None and report.gradient_width is None
    assert report.data_width is not None and report.data_width.width_tokens == pytest.approx(6, rel=0.25)
    assert report.unreinforced == (1000,)
    assert "no model was given" in str(report) and "at 1000 tokens" in str(report)


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


def test_verdict_follows_the_threshold() -> None:
    report = locality(DOCUMENTS, max_lag=64, lengths=(4,))
    reaches = (Reach(100, 0.5, True), Reach(200, 0.02, True), Reach(300, 0.001, False))
    stated = replace(report, reaches=reaches)
    assert stated.unreinforced == (300,) and replace(stated, threshold=0.05).unreinforced == (200, 300)
    assert str(replace(stated, reaches=reaches[:1])).endswith("every length asked about is reinforced")
    assert str(replace(stated, reaches=(Reach(100, 0.5, False),))).endswith("is reinforced, some by the fit only")
    assert isinstance(stated, LocalityReport)


def test_a_length_of_which_nothing_is_known_is_not_called_reinforced() -> None:
    documents = [[1, 2, 3, 4, 5, 6, 7, 8] * 2] * 3 + [list(range(100, 160))]
    report = locality(documents, lengths=(512, 100000), max_lag=8)
    assert report.data_width is None and report.unknown == (512, 100000) and report.unreinforced == ()
    assert "not known at 512 and 100000 tokens" in str(report) and "is reinforced" not in str(report)
    assert report.to_dict()["unknown"] == [512, 100000]
    known = replace(report, reaches=(Reach(100, 0.5, True), Reach(300, 0.001, True), Reach(400, math.nan, False)))
    assert known.unknown == (400,) and known.unreinforced == (300,)
    assert "hardly reinforce attention at 300" in str(known) and "not known at 400" in str(known)


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
