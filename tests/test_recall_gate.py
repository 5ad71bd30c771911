"""The gate: paired samples, what fails and what does not, exit codes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from routeguard import RecallResult, gate
from routeguard.cli.main import app
from routeguard.recall.scores import SampleScore, ValueScore

runner = CliRunner()


def result(shares: dict[int, list[float]], *, task: str = "niah_single_2", **settings) -> RecallResult:
    """A measurement with these scores by length."""
    scores = [
        SampleScore(
            f"{task}/{length}/{i}", task, length, None, i, share,
            (ValueScore("1", 0.5, "right" if share == 1 else "wrong", ""),),
        )
        for length, values in shares.items()
        for i, share in enumerate(values)
    ]  # fmt: skip
    return RecallResult(tuple(scores), {"method": "forced", "seed": 0, **settings})


def test_a_clear_drop_at_one_length_fails() -> None:
    before = result({4096: [1.0] * 20, 8192: [1.0] * 20})
    after = result({4096: [1.0] * 20, 8192: [1.0] * 12 + [0.0] * 8})
    report = gate(before, after)
    assert not report.ok
    assert [(row.length_tokens, row.failed, row.drop) for row in report.rows] == [(4096, False, 0), (8192, True, 0.4)]
    assert "@8192" in str(report) and "FAILED" in str(report)
    assert gate(before, before).ok and gate(after, before).ok  # a gain is no drop


def test_the_size_and_the_significance_both_count() -> None:
    many = result({4096: [1.0] * 400})
    small = gate(many, result({4096: [1.0] * 368 + [0.0] * 32}))  # 8 points, certain
    assert small.ok and small.rows[0].low > 0
    assert not gate(many, result({4096: [1.0] * 368 + [0.0] * 32}), max_drop=0.08).ok
    assert not gate(many, result({4096: [1.0] * 360 + [0.0] * 40})).ok  # exactly ten points
    mixed = result({4096: [0.0, 1.0] * 10})
    noisy = result({4096: [1.0, 0.0] * 4 + [0.0, 0.0] * 2 + [1.0, 0.0] * 4})
    report = gate(mixed, noisy)
    assert report.rows[0].drop == pytest.approx(0.1) and report.ok and report.rows[0].low < 0  # large, by luck


def test_pairing_sees_what_averages_cannot() -> None:
    """Hard and easy samples vary much more than the drop; the pairs all fell."""
    rng = random.Random(0)
    shares = [rng.random() for _ in range(12)]
    before = result({4096: [0.2 + 0.8 * share for share in shares]})
    after = result({4096: [0.08 + 0.8 * share for share in shares]})
    assert not gate(before, after).ok
    shuffled = [s.score for s in after.scores]
    rng.shuffle(shuffled)
    assert gate(before, result({4096: shuffled})).ok  # the same averages


def test_false_alarms_are_rare_and_real_drops_are_found() -> None:
    rng = random.Random(3)

    def failures(after_share: float) -> int:
        found = 0
        for _ in range(60):
            one = result({4096: [float(rng.random() < 0.7) for _ in range(40)]})
            two = result({4096: [float(rng.random() < after_share) for _ in range(40)]})
            found += not gate(one, two, num_resamples=200).ok
        return found

    assert failures(0.7) <= 8 and failures(0.35) >= 50


def test_one_task_can_be_judged_by_itself() -> None:
    def both(last: list[float]) -> RecallResult:
        parts = [result({4096: shares}, task=f"t{i}") for i, shares in enumerate([[1.0] * 20] * 4 + [last])]
        return replace(parts[0], scores=tuple(score for part in parts for score in part.scores))

    before, after = both([1.0] * 20), both([1.0] * 12 + [0.0] * 8)
    lenient, strict = gate(before, after), gate(before, after, each_task=True)
    assert lenient.ok and not strict.ok  # 8 points over all tasks, 40 in one of them
    assert "largest by task: t4 @4096" in str(lenient)
    assert [row.task for row in strict.by_task if row.failed] == ["t4"]


def test_what_was_not_recalled_before_cannot_pass_unsaid() -> None:
    before = result({4096: [1.0] * 20, 8192: [0.0] * 20})
    report = gate(before, before)
    assert report.ok and "note: @8192: recall before was below 0.10, so no drop of 10 points can show" in str(report)
    before = result({4096: [1.0] * 20, 8192: [1.0] * 2 + [0.0] * 18})  # just the limit
    assert "recall before" not in str(gate(before, before))


def test_refusals() -> None:
    before = result({4096: [1.0] * 20})
    with pytest.raises(ValueError, match=r"0 are the same.*differ in seed"):
        gate(before, replace(result({4096: [1.0] * 20}, task="other"), settings={"method": "forced", "seed": 1}))
    with pytest.raises(ValueError, match="AFTER 19, and 19 are the same"):
        gate(before, result({4096: [1.0] * 19}))
    with pytest.raises(ValueError, match="scored forced, AFTER generated"):
        gate(before, result({4096: [1.0] * 20}, method="generated"))
    with pytest.raises(ValueError, match="7 samples at length 4096 are too few"):
        gate(result({4096: [1.0] * 7}), result({4096: [1.0] * 7}))
    with pytest.raises(ValueError, match="max_drop lies above 0"):
        gate(before, before, max_drop=0)


def test_exit_codes_and_json(tmp_path: Path) -> None:
    result({4096: [1.0] * 20}).save(tmp_path / "before" / "recall.json")
    result({4096: [1.0] * 10 + [0.0] * 10}).save(tmp_path / "after.json")
    names = [str(tmp_path / "before"), str(tmp_path / "after.json")]
    fallen = runner.invoke(app, ["gate", *names, "--reasoning-before", "0.4", "--reasoning-after", "0.55"])
    assert fallen.exit_code == 1 and "reasoning" in fallen.output and "-0.15" in fallen.output
    assert runner.invoke(app, ["gate", names[0], names[0]]).exit_code == 0
    assert runner.invoke(app, ["gate", *names, "--max-drop", "60"]).exit_code == 0
    data = json.loads(runner.invoke(app, ["gate", *names, "--json"]).stdout)
    assert data["ok"] is False and data["schema_version"] == 1 and data["rows"][0]["drop"] == 0.5
    for arguments, message in (
        ([names[0], str(tmp_path / "nowhere.json")], "not a file"),
        ([*names, "--reasoning-before", "0.4"], "together"),
    ):
        bad = runner.invoke(app, ["gate", *arguments])
        assert bad.exit_code == 2 and message in bad.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(scores=None), "malformed"),
        (lambda d: d.update(settings=None), "malformed"),
        (lambda d: d.update(notes=None), "malformed"),
        (lambda d: d["scores"][0].update(score="1"), "score='1'"),
        (lambda d: d["scores"][0].update(score=float("nan")), "score=nan"),
        (lambda d: d["scores"][0].update(length_tokens="4096"), "length_tokens='4096'"),
        (lambda d: d["scores"][0].update(key=[1]), "key="),
        (lambda d: d["scores"][0].update(values=3), "not a sample score"),
        (lambda d: d["scores"].append(7), "not a sample score"),
    ],
)
def test_malformed_files_are_refused(change, message: str, tmp_path: Path) -> None:
    good = result({4096: [1.0] * 20})
    good.save(tmp_path / "before.json")
    data = good.to_dict()
    change(data)
    (tmp_path / "after.json").write_text(json.dumps(data))
    for names in (["before.json", "after.json"], ["after.json", "before.json"]):
        bad = runner.invoke(app, ["gate", *(str(tmp_path / name) for name in names)])
        assert bad.exit_code == 2 and message in bad.output and "after.json" in bad.output


def test_scores_that_are_no_numbers_are_not_judged() -> None:
    good = result({4096: [1.0] * 20})
    with pytest.raises(ValueError, match="AFTER has 1 scores that do not lie between 0 and 1, such as nan"):
        gate(good, result({4096: [1.0] * 19 + [float("nan")]}))
    with pytest.raises(ValueError, match="BEFORE has 20 scores"):
        gate(result({4096: [float("nan")] * 20}), good)
