"""The lab's report: arithmetic of a handful of seeds, and a page whose numbers are those of the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab.conditions.sets import AVERAGES
from benchmarks.lab.conditions.table import BEFORE, CONDITIONS
from benchmarks.lab.experiment import journal
from benchmarks.lab.report import plots
from benchmarks.lab.report.claims import Claim, chosen, claims_table, growth_with_length
from benchmarks.lab.report.page import BEGIN, END, replaced, write_page
from benchmarks.lab.report.select import Cell, cells, new_results
from benchmarks.lab.report.statistics import Estimate, correlation, estimate, rank_correlation
from benchmarks.lab.report.tables import best_table, cell_table, headline_table, markdown

# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_intervals_are_students() -> None:
    found = estimate([0.5, 0.6, 0.7])
    assert found.mean == pytest.approx(0.6) and found.half_width == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert estimate([0.4, 0.6]) == Estimate(0.5, None, 2) and not estimate([0.4, 0.6]).above_zero
    assert estimate([0.4]) == Estimate(0.4, None, 1) and not estimate([0.4]).above_zero
    assert estimate([0.1, 0.11, 0.12]).above_zero and not estimate([0.0, 0.1, 0.2]).above_zero
    assert estimate([-0.1, -0.11, -0.12]).below_zero
    assert found.text() == "0.60 ± 0.25" and found.text(signed=True) == "+0.60 ± 0.25"
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_students_quantiles_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (2, 4, 9, 15):
        values = [0.0, *([1.0] * degrees)]
        spread = (degrees / (degrees + 1) / degrees) ** 0.5
        expected = stats.t.ppf(0.975, degrees) * spread / (degrees + 1) ** 0.5
        assert estimate(values).half_width == pytest.approx(expected, rel=1e-3)


def test_correlations() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 3, 4], [1, 100, 10, 1000]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 9]) == pytest.approx(1)
    with pytest.raises(ValueError, match="at least three pairs"):
        correlation([1, 2], [1, 2])
    with pytest.raises(ValueError, match="no correlation"):
        correlation([1, 1, 1], [1, 2, 3])


# -- results -------------------------------------------------------------------------------------------------------


def result(condition: str, seed: int, recall: float, new: float = 1.0, drift: float = 0.4) -> journal.Result:
    """One line as a run would write it; the needle kind that does not count scores nothing."""
    development = seed < 100
    counted, other = ("colours", "digits") if development else ("digits", "colours")
    return {
        "architecture": "lfm2",
        "model_seed": 0,
        "data": "sums",
        "seed": seed,
        "condition": condition,
        "purpose": "development" if development else "confirmation",
        "settings": {"lengths": [128, 512], "steps": 600, "learning_rate": 2e-3, "num_samples": 32},
        "recall": {counted: {"128": recall + 0.1, "512": recall}, other: {"128": 0.0, "512": 0.0}},
        "reasoning": {"new": new, "known": 1.0, "far": 0.5},
        "drift": {} if condition == BEFORE else {"routing": drift, "all": drift / 2 + 0.01 * seed},
        "run": {},
        "model": "abc",
        "versions": {"torch": "1", "transformers": "2", "trl": "3", "python": "4"},
    }


def results(seeds: tuple[int, ...] = (0, 1, 2)) -> list[journal.Result]:
    found = []
    for i, seed in enumerate(seeds):
        found += [
            result(BEFORE, seed, 0.9, new=0.0),
            result("none", seed, 0.3 + 0.05 * i),
            result("qk_restore", seed, 0.5 + 0.05 * i),
            result("freeze", seed, 0.4 + 0.1 * i, drift=0.0),
            result("replay_2", seed, 0.7 + 0.05 * i + 0.001 * i, drift=0.3 - 0.01 * i),
            result("replay_2+restore", seed, 0.8 + 0.05 * i + 0.001 * i, new=0.9),
            result("sacrifice_3", seed, 0.1 - 0.01 * i, drift=0.8),
        ]
    return found


def only_cell(found: list[journal.Result]) -> Cell:
    (cell,) = cells(found)
    return cell


def test_differences_are_paired_over_the_seeds_both_have() -> None:
    cell = only_cell([*results(), result("none", 100 - 1, 0.9)])
    found = cell.difference("replay_2", "qk_restore", cell.recall)
    assert found is not None and found.count == 3 and found.mean == pytest.approx(0.201) and found.above_zero
    assert cell.estimate("replay_2", cell.recall).half_width == pytest.approx(4.303 * 0.051 / 3**0.5)
    assert found.half_width is not None and found.half_width < 0.003  # what seeds share drops out
    assert cell.difference("replay_2", "v_restore", cell.recall) is None
    assert cell.keeps_reasoning("replay_2") and not cell.keeps_reasoning("replay_2+restore")


def test_the_needle_kind_that_counts_depends_on_the_seeds() -> None:
    confirmed, developed = cells([*results(), *results((100, 101, 102))])
    assert (confirmed.purpose, confirmed.kind) == ("confirmation", "digits")
    assert (developed.purpose, developed.kind) == ("development", "colours")
    assert confirmed.estimate("none", confirmed.recall).mean == pytest.approx(0.35)
    assert developed.conditions == [
        BEFORE, "none", "qk_restore", "freeze", "sacrifice_3", "replay_2", "replay_2+restore",
    ]  # fmt: skip
    assert new_results(developed.results["replay_2+restore"][0]) == 0.9


def test_tables_say_what_the_results_say() -> None:
    cell = only_cell(results())
    lines = {line.split("|")[1].strip(): line for line in cell_table(cell).splitlines()}
    assert "| 0.55 ± 0.12 | " in lines["`qk_restore`"]
    assert "**+0.20 ± 0.00**" in lines["`replay_2`"] and "**" not in lines["`replay_2+restore`"]
    assert "0.90 ± 0.00 ↓" in lines["`replay_2+restore`"]
    assert "-0.05 ± 0.12" in lines["`freeze`"]
    best = best_table([cell]).splitlines()
    assert best[2].startswith("| `replay_2` | **+0.20 ± 0.00** | 1 of 1 |")
    assert any(line.startswith("| `replay_2+restore` | +0.30 ± 0.00 ↓ | 0 of 1 |") for line in best)
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_the_headline_has_recall_and_reasoning_side_by_side() -> None:
    lines = headline_table([only_cell(results())]).splitlines()
    assert lines[0] == "|  | lfm2 recall @512 | new results |"
    assert "| QK-Restore (the paper's method) | 0.55 ± 0.12 | 1.00 ± 0.00 |" in lines
    assert not any("averag" in line or "every weight" in line for line in lines)  # no results, no line


def test_claims_are_decided_by_intervals_only() -> None:
    cell = only_cell(results())
    text = claims_table([cell])
    assert text.startswith("| claim | conditions | lfm2 sums |")
    assert "| `qk_restore` − `none` | +0.20 ± 0.00 (+0.00 ± 0.00) ✓ |" in text
    assert "| `qk_restore` − `freeze` | +0.05 ± 0.12 (+0.00 ± 0.00) ? |" in text
    assert "`v_restore`" not in text  # no results, no line
    same = Claim("", "a", "b", equal=True)
    assert same.verdict(Estimate(0.1, 0.05, 3)) == same.verdict(Estimate(-0.1, 0.05, 3)) == "contradicted"
    assert same.verdict(Estimate(0.1, 0.2, 3)) == "undecided"
    assert Claim("", "a", "b").verdict(Estimate(-0.1, 0.05, 3)) == "contradicted"


def test_averages_go_as_far_back_as_reasoning_allows_on_development_seeds() -> None:
    def averaged(seeds: tuple[int, ...], new: tuple[float, float]) -> list[journal.Result]:
        names = ("wise_ft_0.1", "wise_ft_0.25")
        return [
            result(n, seed, 0.7 + i / 10, new=x)
            for seed in seeds
            for i, (n, x) in enumerate(zip(names, new, strict=True))
        ]

    confirmed = cells([*results((100, 101)), *averaged((100, 101), (1.0, 0.2))])
    for new, name in (((1.0, 1.0), "wise_ft_0.25"), ((1.0, 0.9), "wise_ft_0.1"), ((0.9, 0.9), None)):
        developed = cells([*results((0, 1)), *averaged((0, 1), new)])
        assert chosen(developed[0], AVERAGES) == name
        rows = [line for line in claims_table(confirmed, developed).splitlines() if "as far as" in line]
        assert [name in row for row in rows] == ([True] if name else [])


def test_loss_by_length_is_that_of_plain_fine_tuning() -> None:
    found = only_cell(results())
    for seed, lost in ((0, 0.1), (1, 0.2), (2, 0.3)):
        found.results["none"][seed]["recall"]["colours"]["128"] = 1.0 - lost
        found.results["before"][seed]["recall"]["colours"] = {"128": 1.0, "512": 0.9}
    grown = growth_with_length(found)
    assert grown is not None and grown.mean == pytest.approx(((0.6 - 0.1) + (0.55 - 0.2) + (0.5 - 0.3)) / 3)


def test_drift_is_paired_with_the_recall_that_its_own_run_lost() -> None:
    cell = only_cell(results())
    pairs = plots.drift_pairs(cell)
    assert len(pairs) == 9  # none, freeze, sacrifice_3; neither repairs nor replay
    assert sorted(pairs)[:3] == [(0.0, pytest.approx(0.9 - x)) for x in (0.6, 0.5, 0.4)]
    line = plots.drift_line(cell)
    assert line is not None and line[0] == "9" and float(line[1]) > 0.8 and line[3] != line[1]
    assert plots.drift_line(only_cell([r for r in results() if r["condition"] in (BEFORE, "none")])) is None


def test_every_condition_belongs_to_a_family() -> None:
    families = {name: plots.family_of(name) for name in CONDITIONS}
    assert set(families.values()) == set(plots.FAMILIES)
    assert families["qk_restore"] == families["wise_ft_0.25+restore"] == "repair afterwards"
    assert families["sacrifice_3+restore"] == families["freeze"] == "held while training"
    assert families["replay_2"] == "replay alone" and families["replay_2+restore"] == "replay with protection"
    assert families["half_rate+restore"] == families["lora_x1"] == families["long_texts"] == "plain remedy"


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for found in [*results(), *results((100, 101, 102))]:
        journal.append(tmp_path / "results" / "lfm2-sums.jsonl", found)
    page = write_page(tmp_path / "results", tmp_path)
    text = page.read_text().replace("# Evidence\n", "# Evidence\n\nBy hand.\n").replace("0.55 ± 0.12", "wrong")
    page.write_text(text)
    write_page(tmp_path / "results", tmp_path)
    again = page.read_text()
    assert "By hand." in again and "wrong" not in again and "0.55 ± 0.12" in again
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "pareto-confirmation.png",
        "pareto-development.png",
        "drift.png",
    }
    for picture in tmp_path.glob("*.png"):
        assert f"({picture.name})" in again
    write_page(tmp_path / "results", tmp_path)
    assert page.read_text() == again


def test_a_page_without_its_marks_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    assert replaced(f"a\n{BEGIN.format('x')}\nold\n{END}\nb", "x", "new\\1") == (
        f"a\n{BEGIN.format('x')}\n\nnew\\1\n\n{END}\nb"
    )
    with pytest.raises(ValueError, match="once each"):
        replaced("nothing", "x", "new")
    with pytest.raises(ValueError, match="no results in"):
        write_page(tmp_path, tmp_path)
