"""Show a demo's result: a table on the terminal, `demo.json`, and `recall.png`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from routeguard.demo.run import BEFORE, DemoResult, Row
from routeguard.plots import NoMatplotlibError, finish, new_figure, tidy
from routeguard.storage import durable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA_VERSION = 1
LEGEND = """\
@N        recall: right needle digits in N tokens of context (pretraining saw up to 256)
new sums  right sums of the kind that only fine-tuning taught
look-ups  right sums that look up any earlier variable, a skill from pretraining
drift     ‖W − W₀‖ / ‖W₀‖ of the query and key weights in the full-attention layers
All of it measured in this run."""
PLOT_HINT = "recall.png was not drawn: matplotlib is not installed (pip install 'routeguard[plots]')"

# Okabe-Ito colours: distinguishable with any colour vision.
_COLOURS = (
    "#777777",
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#000000",
    "#B8A000",
    "#8B4513",
)


def table(result: DemoResult) -> Table:
    """Lay out recall by context length beside reasoning and drift: one line a model, mean and range of seeds."""
    lengths = list(result.rows[0].recall)
    seeds = "one seed" if result.seeds == 1 else f"{result.seeds} seeds (mean, lowest–highest)"
    view = Table(
        title=f"Tiny hybrid after {result.steps} steps of chain-of-thought SFT, {seeds}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    view.add_column("model", no_wrap=True)
    for length in lengths:
        view.add_column(f"@{length}", justify="right", overflow="fold")
    for heading in ("new sums", "look-ups", "drift"):
        view.add_column(heading, justify="right", overflow="fold")
    for name in result.names:
        rows = result.of(name)
        cells = [_cell(rows, lambda row, n=length: row.recall[n]) for length in lengths]  # type: ignore[misc]
        cells += [_cell(rows, _new_sums), _cell(rows, _far_lookups), _cell(rows, lambda row: row.drift)]
        view.add_row(name, *cells)
    return view


def write_json(result: DemoResult, path: Path) -> None:
    """Write all rows, the settings and the versions they were measured with."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "steps": result.steps,
        "seeds": result.seeds,
        "seconds": round(result.seconds, 1),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "trl")},
        "rows": [asdict(row) for row in result.rows],
    }
    durable.write_json(path, content)


def write_plot(result: DemoResult, path: Path) -> bool:
    """Draw recall by context length beside reasoning, or return False where matplotlib is missing."""
    try:
        figure, (left, right) = new_figure(1, 2, width=11, height=5.2, width_ratios=(1.35, 1))
    except NoMatplotlibError:
        return False
    _draw_recall(left, result)
    _draw_reasoning(right, result)
    seeds = "one seed" if result.seeds == 1 else f"{result.seeds} seeds, mean and range"
    figure.suptitle(
        f"A tiny hybrid model after {result.steps} steps of chain-of-thought fine-tuning ({seeds})", fontsize=12
    )
    finish(figure, path)
    return True


def _draw_recall(axes: Axes, result: DemoResult) -> None:
    """Lines of recall over context length, with a band from the lowest to the highest seed."""
    lengths = list(result.rows[0].recall)
    for name, colour in zip(result.names, _COLOURS, strict=False):
        by_length = [[row.recall[n] for row in result.of(name)] for n in lengths]
        style = "--" if name == BEFORE else "-"
        axes.plot(lengths, [fmean(v) for v in by_length], style, color=colour, marker="o", linewidth=2, label=name)
        if result.seeds > 1:
            axes.fill_between(
                lengths, [min(v) for v in by_length], [max(v) for v in by_length], color=colour, alpha=0.12, linewidth=0
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("context length (tokens; pretraining saw up to 256)")
    axes.set_title("Recall: share of right needle digits", fontsize=11)
    tidy(axes)
    axes.set_ylim(-0.02, 1.04)
    axes.figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=min(5, len(result.names)))


def _draw_reasoning(axes: Axes, result: DemoResult) -> None:
    """Bars of the two reasoning scores, in the colours of the lines."""
    scores: Sequence[tuple[str, Callable[[Row], float]]] = (
        ("new sums\n(what fine-tuning teaches)", _new_sums),
        ("far look-ups\n(a pretrained skill)", _far_lookups),
    )
    num_names = len(result.names)
    width = 0.8 / num_names
    many = num_names > 5
    for i, (name, colour) in enumerate(zip(result.names, _COLOURS, strict=False)):
        for group, (_, value) in enumerate(scores):
            values = [value(row) for row in result.of(name)]
            mean, place = fmean(values), group + (i - (num_names - 1) / 2) * width
            errors = [[mean - min(values)], [max(values) - mean]] if result.seeds > 1 else None
            axes.bar(place, mean, width * 0.92, color=colour, yerr=errors, error_kw={"linewidth": 1})
            axes.text(place, max(values) + 0.015, f"{mean:.2f}", ha="center", fontsize=8, rotation=90 * many)
    axes.set_xticks(range(len(scores)), [label for label, _ in scores])
    axes.tick_params(axis="x", length=0)
    axes.set_title("Reasoning: share of right sums", fontsize=11)
    tidy(axes)
    axes.set_ylim(0, 1.15)


def _new_sums(row: Row) -> float:
    return row.reasoning.new_sums


def _far_lookups(row: Row) -> float:
    return row.reasoning.far_lookups


def _cell(rows: Sequence[Row], value: Callable[[Row], float]) -> str:
    values = [value(row) for row in rows]
    mean = f"{fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean}\n{min(values):.2f}–{max(values):.2f}"
