"""Recall over steps, heatmaps by length and depth, and the gate's verdict."""

from __future__ import annotations

from collections.abc import Mapping

from routeguard.recall.gate import GateReport
from routeguard.recall.plot import short_length
from routeguard.recall.result import Cell, RecallResult
from routeguard.report import markup
from routeguard.report.chart import Line, line_chart
from routeguard.report.run import RunReport
from routeguard.report.words import by_length, cell_text, spread

_BINS = 5
_MOST_STEPS = 12
_MEANING = "Share of right answers, 0 to 1; in brackets the 95 % interval (Wilson)."


def recall_run_section(run: RunReport) -> str:
    """What the run measured itself; empty where it measured nothing."""
    if not run.probed:
        return ""
    steps = sorted(run.probed)
    tables = {step: by_length(run.probed[step]) for step in steps}
    lengths = sorted({length for cells in tables.values() for length in cells})
    lines = [
        Line(f"{n} tokens", [(step, tables[step][n].accuracy) for step in steps if n in tables[step]], i)
        for i, n in enumerate(lengths)
    ]
    for i, n in enumerate(lengths):
        points = [(step, by_length(r)[n].accuracy) for step, r in run.probed_restored.items() if n in by_length(r)]
        if points:
            lines.append(Line(f"{n} tokens, restored", points, i, rings=True))
    alt = f"Recall from step {steps[0]} to {steps[-1]} at {len(lengths)} lengths; the table below has the numbers"
    chosen = spread(steps, _MOST_STEPS)
    rows = [(f"step {s}", *(_text(tables[s].get(n)) for n in lengths)) for s in chosen]
    rows += [
        (f"step {s}, restored", *(_text(by_length(r).get(n)) for n in lengths)) for s, r in run.probed_restored.items()
    ]
    first = run.probed[steps[0]]
    count = ", ".join(f"{cell.count} at {n}" for n, cell in by_length(first).items())
    return markup.section(
        "Recall during the run",
        markup.paragraph(f"{', '.join(first.tasks)}; samples of a measurement: {count}. {_MEANING}", "soft"),
        line_chart(lines, name="recall", alt=alt, x_label="optimizer step", y_label="recall", top=1.0),
        markup.table(f"{len(chosen)} of {len(steps)} measurements", ("when", *(f"{n} tokens" for n in lengths)), rows),
        _heatmaps(run.states_during),
    )


def recall_given_section(run: RunReport) -> str:
    """Results of `routeguard recall`; empty where none was given."""
    if not run.given:
        return ""
    lengths = sorted({n for result in run.given.values() for n in result.lengths})
    rows = []
    for name, result in run.given.items():
        cells = {cell.label: cell for cell in result.cells()}
        rows += [(name, task, *(_text(cells.get((task, n))) for n in lengths)) for task in result.tasks]
        if len(result.tasks) > 1:
            rows.append((name, "all tasks", *(_text(by_length(result).get(n)) for n in lengths)))
    return markup.section(
        "Recall measured beside the run",
        markup.paragraph(_MEANING, "soft"),
        markup.table(
            "Recall by task and length", ("state", "task", *(f"{n} tokens" for n in lengths)), rows, words={1}
        ),
        _heatmaps(run.given),
    )


def gate_section(run: RunReport) -> str:
    """Verdicts of the gate, and reasoning scores; empty where there is neither."""
    parts = [_verdict(v.name, v.report) if v.report is not None
             else markup.paragraph(f"{v.name}: no verdict. {v.problem}", "bad") for v in run.verdicts]  # fmt: skip
    if run.reasoning is not None:
        before, after = run.reasoning
        parts.append(
            markup.table(
                "Reasoning score, as given (not judged)",
                ("", "before", "after", "change"),
                [("reasoning", f"{before:g}", f"{after:g}", f"{after - before:+g}")],
            )
        )
    return markup.section("Gate" if run.verdicts else "Reasoning", *parts) if parts else ""


def _verdict(name: str, report: GateReport) -> str:
    rows = [
        (
            f"{row.length_tokens} tokens",
            row.count,
            f"{row.before:.2f}",
            f"{row.after:.2f}",
            f"{row.drop:+.2f} [{row.low:+.2f}, {row.high:+.2f}]",
            f"{row.num_lost} / {row.num_gained}",
            f"{row.p_bootstrap:.3f} / {row.p_sign:.3f}",
            "FAILED" if row.failed else "passed",
        )
        for row in report.rows
    ]
    rule = (
        f"A drop of at least {100 * report.max_drop:g} points fails where it is significant at "
        f"{100 * report.confidence:g} % by both tests (paired bootstrap, sign test)."
    )
    return (
        markup.paragraph(f"{name}: {'passed' if report.ok else 'FAILED'}", "good" if report.ok else "bad")
        + markup.table(
            f"Recall {name}, the same samples",
            ("length", "samples", "first", "then", "drop", "lost / gained", "p bootstrap / sign", "verdict"),
            rows,
        )
        + markup.paragraph(rule, "soft")
    )


def _heatmaps(states: Mapping[str, RecallResult]) -> str:
    """One table a task and state: depth down, length across."""
    parts = ["<h3>By depth and length</h3>"]
    for task in dict.fromkeys(task for result in states.values() for task in result.tasks):
        side = [_heatmap(f"{task}, {name}", r, task) for name, r in states.items() if task in r.tasks]
        parts.append(f'<div class="side">{"".join(side)}</div>')
    parts.append(
        markup.paragraph(
            "Depth is where the value stood, from the beginning of the context; empty: none stood there.", "soft"
        )
    )
    return "".join(parts)


def _heatmap(caption: str, result: RecallResult, task: str) -> str:
    found = result.by_depth(_BINS, task=task)
    lengths = sorted({length for length, _ in found})
    rows = [
        (
            f"{100 * part // _BINS}–{100 * (part + 1) // _BINS} %",
            [found[n, part][0] if (n, part) in found else None for n in lengths],
        )
        for part in range(_BINS)
    ]
    return markup.shaded(caption, ("depth", *map(short_length, lengths)), rows, top=1.0)


def _text(cell: Cell | None) -> str:
    return "not measured" if cell is None else cell_text(cell)
