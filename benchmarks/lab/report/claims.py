"""Claims about protections as paired comparisons: what should be above what, and what the results say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.lab.conditions.sets import AVERAGES, REPLAYED_AVERAGES
from benchmarks.lab.conditions.table import BEFORE, NONE, QK
from benchmarks.lab.report.select import Cell, new_results
from benchmarks.lab.report.statistics import Estimate, estimate
from benchmarks.lab.report.tables import markdown

Verdict = Literal["supported", "contradicted", "undecided"]


@dataclass(frozen=True)
class Claim:
    """Recall at the longest length after `better` is above that after `worse`; `equal` claims no difference.

    Attributes:
        text: the claim in words.
        better, worse: conditions.
        equal: the claim is that they are alike.
    """

    text: str
    better: str
    worse: str
    equal: bool = False

    def verdict(self, difference: Estimate) -> Verdict:
        """Whether the 95 % interval of the difference decides the claim."""
        if self.equal:
            return "contradicted" if difference.above_zero or difference.below_zero else "undecided"
        if difference.above_zero:
            return "supported"
        return "contradicted" if difference.below_zero else "undecided"


MARKS: dict[Verdict, str] = {"supported": "✓", "contradicted": "✗", "undecided": "?"}

CLAIMS = (
    Claim("QK-Restore brings recall back", QK, NONE),
    Claim("joint restore beats queries only", QK, "q_restore"),
    Claim("joint restore beats keys only", QK, "k_restore"),
    Claim("restoring V does nothing", "v_restore", NONE, equal=True),
    Claim("freezing is worse than free-then-restore", QK, "freeze"),
    Claim("the few retrieval heads suffice (2 heads against all)", "heads_2_restore", QK, equal=True),
    Claim("sacrificial routing beats restore alone", "sacrifice_3+restore", QK),
    Claim("restoring Q, K, V and O beats QK-Restore", "qkvo_restore", QK),
    Claim("averaging every weight with its start (10 %) beats QK-Restore", "wise_ft_0.1", QK),
    Claim("pulling every weight to its start (L2-SP) beats QK-Restore", "l2_sp_0.9", QK),
    Claim("L2-SP beats averaging every weight (10 %)", "l2_sp_0.9", "wise_ft_0.1"),
    Claim("L2-SP brings back what plain fine-tuning loses", "l2_sp_0.9", NONE),
    Claim("replaying other needles (5 %) beats QK-Restore", "replay_5", QK),
    Claim("replay and averaging beat QK-Restore", "replay_5+wise_ft_0.1", QK),
    Claim("replay and averaging beat replay alone", "replay_5+wise_ft_0.1", "replay_5"),
    Claim("replay with L2-SP beats QK-Restore", "l2_sp_0.9+replay_5", QK),
    Claim("replay with L2-SP beats replay and averaging", "l2_sp_0.9+replay_5", "replay_5+wise_ft_0.1"),
    Claim("replay with L2-SP beats L2-SP alone", "l2_sp_0.9+replay_5", "l2_sp_0.9"),
    Claim("replay, then restore, beats replay alone", "replay_5+restore", "replay_5"),
    Claim("replay with Q/K frozen beats replay alone", "freeze+replay_5", "replay_5"),
)


# A repair of which development chooses the strength, with the strengths, the weakest first.
CHOSEN = (
    ("averaging as far as QK-Restore's reasoning allows beats QK-Restore", AVERAGES),
    ("replay and averaging as far as QK-Restore's reasoning allows beat QK-Restore", REPLAYED_AVERAGES),
)


def chosen(development: Cell, names: Sequence[str]) -> str | None:
    """The strongest of some conditions that on development seeds has at least QK-Restore's reasoning; None if none."""
    kept = [name for name in names if name in development.results and development.keeps_reasoning(name)]
    return kept[-1] if kept else None


def claims_table(cells: Sequence[Cell], development: Sequence[Cell] = ()) -> str:
    """A line a claim, a column a cell: difference of recall, that of reasoning in brackets, and the verdict.

    Args:
        cells: where claims are tested.
        development: cells of the development seeds, on which strengths are chosen.
    """
    rows = [_line(claim.text, [claim] * len(cells), cells) for claim in CLAIMS]
    for text, names in CHOSEN:
        found = [_chosen_in(cell, development, names) for cell in cells]
        rows.append(_line(text, [None if name is None else Claim(text, name, QK) for name in found], cells, named=True))
    growth = [growth_with_length(cell) for cell in cells]
    verdicts = ["–" if g is None else f"{g.text(signed=True)} {MARKS[Claim('', '', '').verdict(g)]}" for g in growth]
    rows.append(["the loss grows with length", "`none`: lost @longest − lost @shortest", *verdicts])
    headings = ("claim", "conditions", *(f"{cell.architecture} {cell.data}" for cell in cells))
    return markdown(headings, [row for row in rows if any(text != "–" for text in row[2:])])


def _chosen_in(cell: Cell, development: Sequence[Cell], names: Sequence[str]) -> str | None:
    same = [d for d in development if (d.architecture, d.data) == (cell.architecture, cell.data)]
    return chosen(same[0], names) if same else None


def _line(text: str, claims: Sequence[Claim | None], cells: Sequence[Cell], *, named: bool = False) -> list[str]:
    first = next((claim for claim in claims if claim is not None), None)
    pair = "" if first is None else f"`{first.better}` − `{first.worse}`"
    values = [_value(claim, cell, named=named) for claim, cell in zip(claims, cells, strict=True)]
    return [text, f"chosen − `{QK}`" if named else pair, *values]


def _value(claim: Claim | None, cell: Cell, *, named: bool) -> str:
    if claim is None:
        return "–"
    recall = cell.difference(claim.better, claim.worse, cell.recall)
    reasoning = cell.difference(claim.better, claim.worse, new_results)
    if recall is None or reasoning is None:
        return "–"
    name = f"`{claim.better}`: " if named else ""
    return f"{name}{recall.text(signed=True)} ({reasoning.text(signed=True)}) {MARKS[claim.verdict(recall)]}"


def growth_with_length(cell: Cell) -> Estimate | None:
    """Recall lost by plain fine-tuning at the longest length, less what is lost at the shortest, paired over seeds."""
    before, after = cell.results.get(BEFORE, {}), cell.results.get(NONE, {})
    short, long = cell.recall_at(cell.lengths[0]), cell.recall
    seeds = sorted(before.keys() & after.keys())
    if not seeds:
        return None
    return estimate([(long(before[s]) - long(after[s])) - (short(before[s]) - short(after[s])) for s in seeds])
