"""The evidence page: text written by hand around parts that are generated from the results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.conditions.table import BEFORE, QK
from benchmarks.lab.experiment import journal
from benchmarks.lab.measuring.reach import REACH_FILE
from benchmarks.lab.measuring.scores import NUM_NEEDLES
from benchmarks.lab.report import plots
from benchmarks.lab.report.claims import claims_table
from benchmarks.lab.report.select import EQUAL_REASONING, Cell, cells
from benchmarks.lab.report.tables import best_table, cell_table, headline_table, markdown, reach_table
from benchmarks.lab.training.data import MAIN_DATA

BEGIN, END = "<!-- generated: {} -->", "<!-- end of generated part -->"
PARTS = ("outcome", "claims", "drift", "reach", "confirmation", "development")
SKELETON = "# Evidence\n\n" + "\n\n".join(f"{BEGIN.format(part)}\n{END}" for part in PARTS) + "\n"


def write_page(results: Path, output: Path) -> Path:
    """Write README.md and its plots; what is written by hand there stays.

    Args:
        results: folder of the results.
        output: folder of the page.

    Raises:
        ValueError: there are no results, or the page lacks the marks of a generated part.
    """
    found = cells(journal.read_all(results))
    if not found:
        raise ValueError(f"no results in {results}; make some with `python -m benchmarks.lab run`")
    output.mkdir(parents=True, exist_ok=True)
    page = output / "README.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else SKELETON
    parts = {
        "confirmation": _by_cell([cell for cell in found if cell.purpose == "confirmation"], output, "confirmation"),
        "development": _by_cell([cell for cell in found if cell.purpose == "development"], output, "development"),
        "outcome": _outcome(found),
        "claims": _claims(found),
        "drift": _drift(found, output),
        "reach": reach_table(journal.read(results / REACH_FILE)),
    }
    for name, content in parts.items():
        text = replaced(text, name, content)
    page.write_text(text, encoding="utf-8")
    return page


def replaced(text: str, part: str, content: str) -> str:
    """The text with other content in a generated part. Raises ValueError where the part's marks are missing."""
    begin = BEGIN.format(part)
    pattern = re.compile(re.escape(begin) + r"\n.*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the page needs the lines {begin!r} and {END!r} once each, one after the other")
    return pattern.sub(lambda _: f"{begin}\n\n{content}\n\n{END}", text)


def _by_cell(found: Sequence[Cell], output: Path, name: str) -> str:
    """An overview over all cells, a Pareto plot, and each cell's whole table."""
    if not found:
        return "No results yet."
    plots.pareto(found, output / f"pareto-{name}.png")
    lines = [
        f"![Recall at the longest length against reasoning](pareto-{name}.png)",
        "",
        f"Difference of recall at the longest length to `{QK}`, paired over seeds, with 95 % intervals (Student's t);"
        f" bold where the interval is above 0 and reasoning is equal or better. ↓: more than {EQUAL_REASONING:.2f} less"
        f" reasoning than `{QK}`, so not counted.",
        "",
        best_table(found),
    ]
    for cell in found:
        lines += ["", f"#### {cell.title}", "", _caption(cell), "", cell_table(cell)]
    return "\n".join(lines)


def _caption(cell: Cell) -> str:
    results = [result for seeds in cell.results.values() for result in seeds.values()]
    settings, versions = results[0]["settings"], results[0]["versions"]
    seeds = ", ".join(map(str, sorted({result["seed"] for result in results})))
    models = ", ".join(sorted({result["model"] for result in results}))
    questions = settings["num_samples"] * NUM_NEEDLES
    return (
        f"Needles: {cell.kind}. Seeds {seeds} of data and run; one pretrained model ({models})."
        f" {settings['steps']} steps at {settings['learning_rate']:g} unless the condition says otherwise;"
        f" {questions} questions a length and seed. `{BEFORE}` is the pretrained model."
        f" torch {versions['torch']}, transformers {versions['transformers']}, trl {versions['trl']}."
    )


def _outcome(found: Sequence[Cell]) -> str:
    """The main chain's confirmation in a few lines; development where nothing is confirmed."""
    main = [cell for cell in found if cell.data == MAIN_DATA]
    confirmed = [cell for cell in main if cell.purpose == "confirmation"]
    used = confirmed or main or list(found)
    seeds = ", ".join(f"{cell.architecture} {max(map(len, cell.results.values()))}" for cell in used)
    note = f"Means over {used[0].purpose} seeds ({seeds}) with 95 % intervals."
    return f"{note}\n\n{headline_table(used)}"


def _claims(found: Sequence[Cell]) -> str:
    """The claims on the seeds that confirm, and on those that chose where there are no others."""
    confirmed = [cell for cell in found if cell.purpose == "confirmation"]
    used = confirmed or found
    about = "confirmation" if confirmed else "development: nothing is confirmed yet"
    note = (
        f"Seeds: {about}. Difference of recall at the longest length, in brackets that of new results, paired over"
        " seeds, with 95 % intervals. ✓ supported, ✗ contradicted (the interval of recall leaves out 0), ? undecided."
    )
    return f"{note}\n\n{claims_table(used, [cell for cell in found if cell.purpose == 'development'])}"


def _drift(found: Sequence[Cell], output: Path) -> str:
    lines = [line for cell in found if (line := plots.drift_line(cell))]
    if not lines:
        return "No results yet."
    plots.drift_plot([cell for cell in found if plots.drift_line(cell)], output / "drift.png")
    named = [(f"{cell.title}, {cell.purpose}", *line) for cell in found if (line := plots.drift_line(cell))]
    return "\n".join(
        [
            "![Recall lost against drift of queries and keys](drift.png)",
            "",
            markdown(("cell", "runs", "Q/K: Pearson", "Spearman", "all weights: Pearson", "Spearman"), named),
        ]
    )
