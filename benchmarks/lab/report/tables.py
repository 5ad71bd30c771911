"""Markdown tables of the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.lab.conditions.table import BEFORE, NONE, QK
from benchmarks.lab.experiment.journal import Result
from benchmarks.lab.language.needles import DEVELOPMENT
from benchmarks.lab.models.architectures import ARCHITECTURES
from benchmarks.lab.report.select import Cell, new_results
from benchmarks.lab.training.data import DATA_KINDS


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first are right-aligned."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell_table(cell: Cell) -> str:
    """Every condition of a cell: recall by length, reasoning, drift, and the difference to QK-Restore.

    In a confirmation the kind that conditions were chosen on stands beside the tested one, at the longest length.
    """
    longest = cell.lengths[-1]
    beside = [DEVELOPMENT.name] if cell.kind != DEVELOPMENT.name else []
    headings = [
        "condition",
        "seeds",
        *(f"recall @{length}" for length in cell.lengths),
        f"@{longest} against {QK}",
        *(f"{kind} @{longest}" for kind in beside),
        "new results",
        "far look-ups",
        "Q/K drift",
    ]
    rows = []
    for name in cell.conditions:
        difference = None if name in (BEFORE, QK) else cell.difference(name, QK, cell.recall)
        results = cell.results[name]
        drifts = [result["drift"]["routing"] for result in results.values() if result["drift"]]
        equal = name in (BEFORE, QK) or QK not in cell.results or cell.keeps_reasoning(name)
        rows.append(
            [
                f"`{name}`",
                str(len(results)),
                *(cell.estimate(name, cell.recall_at(length)).text() for length in cell.lengths),
                "" if difference is None else _marked(difference.text(signed=True), equal and difference.above_zero),
                *(cell.estimate(name, cell.recall_at(longest, kind)).text() for kind in beside),
                cell.estimate(name, new_results).text() + ("" if equal else " ↓"),
                cell.estimate(name, lambda result: float(result["reasoning"]["far"])).text(),
                f"{sum(drifts) / len(drifts):.2f}" if drifts else "0.00",
            ]
        )
    return markdown(headings, rows)


HEADLINES = {
    BEFORE: "before fine-tuning",
    NONE: "unguarded",
    "freeze": "queries and keys frozen",
    QK: "QK-Restore (the paper's method)",
    "interpolate_0.5": "queries and keys half of the way back",
    "wise_ft_0.1": "every weight 10 % of the way back",
    "wise_ft_0.25": "every weight 25 % of the way back",
    "l2_sp_0.9": "every weight pulled to its start meanwhile (L2-SP)",
    "l2_sp_0.9+wise_ft_0.1": "L2-SP, then every weight 10 % back",
    "replay_5": "5 % replay of other needles",
    "replay_5+wise_ft_0.1": "the replay, then every weight 10 % back",
    "replay_5+wise_ft_0.25": "the replay, then every weight 25 % back",
    "l2_sp_0.9+replay_5": "the replay and L2-SP",
    "l2_sp_0.9+replay_5+wise_ft_0.1": "the replay and L2-SP, then every weight 10 % back",
}


def headline_table(cells: Sequence[Cell]) -> str:
    """What matters most in one look: recall at the longest length and new results, a column pair a cell."""
    headings = ["", *(t for cell in cells for t in (f"{cell.architecture} recall @{cell.lengths[-1]}", "new results"))]
    rows = []
    for name, words in HEADLINES.items():
        texts = []
        for cell in cells:
            there = name in cell.results
            texts += [cell.estimate(name, score).text() if there else "–" for score in (cell.recall, new_results)]
        if any(text != "–" for text in texts):
            rows.append([words, *texts])
    return markdown(headings, rows)


def best_table(cells: Sequence[Cell]) -> str:
    """Conditions by how many cells they beat QK-Restore in, with at least its reasoning."""
    names = dict.fromkeys(name for cell in cells for name in cell.conditions if name not in (BEFORE, QK))
    lines: list[tuple[int, float, list[str]]] = []
    for name in names:
        texts, wins, means = [], 0, []
        for cell in cells:
            difference = cell.difference(name, QK, cell.recall)
            if difference is None:
                texts.append("–")
                continue
            equal = cell.keeps_reasoning(name)
            wins += equal and difference.above_zero
            means.append(difference.mean if equal else -1.0)
            texts.append(
                _marked(difference.text(signed=True), equal and difference.above_zero) + ("" if equal else " ↓")
            )
        if means:
            lines.append((wins, sum(means) / len(means), [f"`{name}`", *texts, f"{wins} of {len(means)}"]))
    lines.sort(key=lambda line: (-line[0], -line[1]))
    headings = ["condition", *(f"{cell.architecture} {cell.data}" for cell in cells), "ahead"]
    return markdown(headings, [row for _, _, row in lines])


def reach_table(measured: Sequence[Result]) -> str:
    """How far back look-ups and gradient reach, by model and data."""
    rows = [
        [
            f"{ARCHITECTURES[line['architecture']].title}, {DATA_KINDS[line['data']].title}",
            *(str(line[what][part]) for part in ("half", "most") for what in ("look_ups", "gradient")),
        ]
        for line in measured
    ]
    if not rows:
        return "Not measured yet."
    headings = ("model and data", "half: look-ups", "half: gradient", "nine tenths: look-ups", "nine tenths: gradient")
    return markdown(headings, rows)


def _marked(text: str, good: bool) -> str:
    return f"**{text}**" if good else text
