"""Drift by layer and step: a chart, a table, and the logit form of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from routeguard.report import markup
from routeguard.report.chart import NUM_COLOURS, Line, line_chart
from routeguard.report.run import RunReport
from routeguard.report.words import number, spread
from routeguard.routes.collection import ROLES

if TYPE_CHECKING:
    from routeguard.diagnostics.drift_report import DriftReport

_TITLE = "Drift"
_MOST_LINES = 2 * NUM_COLOURS
_MOST_STEPS = 7
_MEANING = "‖W − W₀‖ / ‖W₀‖ of the query and key weights of a layer: 0 is where they started."


def drift_section(run: RunReport) -> str:
    """Empty where the run recorded no step."""
    drift = run.drift
    if drift is None:
        return ""
    last = drift.samples[-1]
    if not any(value for sample in drift.samples for value in sample.factors.values()):
        text = f"0 in every layer at each of the {len(drift.samples)} recorded steps (the last is {last.step})."
        return markup.section(_TITLE, markup.paragraph(_MEANING, "soft"), markup.paragraph(text))
    cells = sorted(last.factors, key=lambda cell: (cell[0], ROLES.index(cell[1])))
    parts = [markup.paragraph(_MEANING, "soft"), _chart(drift, cells)]
    steps = spread(drift.samples, _MOST_STEPS)
    parts.append(
        markup.table(
            f"Drift at {len(steps)} of {len(drift.samples)} recorded steps",
            ("layer", "role", *(f"step {sample.step}" for sample in steps)),
            [(n, role, *(number(sample.factors.get((n, role))) for sample in steps)) for n, role in cells],
            words={1},
        )
    )
    if run.restore is not None:
        parts.append(markup.paragraph("These are the weights before what was done at the end."))
    return markup.section(_TITLE, *parts, _heads(drift))


def _chart(drift: DriftReport, cells: Sequence[tuple[int, str]]) -> str:
    """One line a layer and role; where that is too many, the mean and the largest of each role."""
    if len(cells) <= _MOST_LINES:
        order = {layer: i for i, layer in enumerate(drift.layers)}
        lines = [
            Line(f"layer {n} {role}", list(zip(*drift.series(n, role), strict=True)), order[n], dashed=role == "key")
            for n, role in cells
        ]
        what = f"each of {len(lines)} layers and roles"
    else:
        lines = []
        for i, role in enumerate(dict.fromkeys(role for _, role in cells)):
            of_role = [(s.step, [v for (_, r), v in s.factors.items() if r == role]) for s in drift.samples]
            known = [(step, values) for step, values in of_role if values]
            lines.append(Line(f"{role}, mean of layers", [(step, sum(v) / len(v)) for step, v in known], i))
            lines.append(Line(f"{role}, largest layer", [(step, max(v)) for step, v in known], i, dashed=True))
        what = "the mean and the largest layer of each role"
    alt = f"Relative drift over {drift.samples[-1].step} optimizer steps, {what}; the table below has the numbers"
    return line_chart(lines, name="drift", alt=alt, x_label="optimizer step", y_label="relative drift")


def _heads(drift: DriftReport) -> str:
    sample = drift.last_routing
    if sample is None:
        return ""
    widest = max(len(heads) for heads in sample.routing.values())
    top = max((value for heads in sample.routing.values() for value in heads if value == value), default=0.0)
    rows = [
        (f"layer {layer}", [*heads, *[None] * (widest - len(heads))]) for layer, heads in sorted(sample.routing.items())
    ]
    return markup.shaded(
        f"Drift of the logit form of each query head, step {sample.step}",
        ("", *(f"head {i}" for i in range(widest))),
        rows,
        top=top,
    )
