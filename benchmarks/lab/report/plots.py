"""Plots of the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab.conditions.table import BEFORE, CONDITIONS, NONE, QK, Condition
from benchmarks.lab.experiment.journal import Result
from benchmarks.lab.report.select import Cell, new_results
from benchmarks.lab.report.statistics import correlation, rank_correlation
from routeguard.plots import COLOURS, GREY, finish, new_figure, tidy

FAMILIES = ("repair afterwards", "held while training", "replay alone", "replay with protection", "plain remedy")
MARKERS = ("o", "s", "^", "D", "v")


def family_of(name: str) -> str:
    """The family that a condition is drawn as."""
    condition = CONDITIONS[name]
    training = condition.training
    mechanisms = (training.protect, training.trust_radius, training.settle_at)
    held = any(m is not None for m in mechanisms) or training.routing_rate != 1.0
    if training.replay:
        return FAMILIES[3] if held or condition.repair.settings() else FAMILIES[2]
    if held:
        return FAMILIES[1]
    plain = training.rate == training.steps == 1.0 and training.lora is None and not training.settings()
    return FAMILIES[0] if plain else FAMILIES[4]


def pareto(cells: Sequence[Cell], path: Path) -> None:
    """Recall at the longest length against reasoning, a panel a cell; the undominated conditions are named.

    Full fine-tuning, and plain LoRA: what else was done to adapters is in the tables.
    """
    columns = min(3, len(cells))
    rows = -(-len(cells) // columns)
    figure, panels = new_figure(rows, columns, width=max(7.0, 5.4 * columns), height=4.6 * rows + 0.6, squeeze=False)
    for axes, cell in zip(panels.flat, cells, strict=False):
        _pareto_panel(axes, cell)
    for axes in panels.flat[len(cells) :]:
        axes.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    finish(figure, path)


def _pareto_panel(axes: Any, cell: Cell) -> None:
    points = {
        name: (cell.estimate(name, new_results), cell.estimate(name, cell.recall))
        for name in cell.conditions
        if name in CONDITIONS and _is_drawn(CONDITIONS[name])
    }
    for family, colour, marker in zip(FAMILIES, COLOURS, MARKERS, strict=False):
        members = [name for name in points if family_of(name) == family and name != NONE]
        x, y = ([points[name][i].mean for name in members] for i in (0, 1))
        errors = [points[name][1].half_width or 0.0 for name in members]
        axes.errorbar(x, y, errors, fmt=marker, color=colour, label=family, markersize=5, elinewidth=0.6, alpha=0.8)
    if NONE in points:
        axes.plot(*(p.mean for p in points[NONE]), "X", color="black", markersize=9, label="no protection")
    front = [n for n in points if not any(_dominates(points[m], points[n]) for m in points)]
    named = sorted({*front, NONE, QK, "freeze"} & points.keys(), key=lambda name: -points[name][1].mean)
    height = 1.0
    for name in named:  # from the top down, each label below the one before
        x, y = (p.mean for p in points[name])
        height = min(y + 0.02, height - 0.035)
        axes.annotate(
            name, (x, y), xytext=(x - 0.004, height), textcoords="data", ha="right",
            fontsize=7, fontweight="bold" if name in front else "normal",
        )  # fmt: skip
    if BEFORE in cell.results:
        before = cell.estimate(BEFORE, cell.recall).mean
        axes.axhline(before, color=GREY, linestyle="--", linewidth=1)
        axes.text(
            0.01,
            before,
            "before fine-tuning",
            fontsize=7,
            color=GREY,
            va="bottom",
            transform=axes.get_yaxis_transform(),
        )
    seeds = max(len(results) for results in cell.results.values())
    axes.set_title(f"{cell.title}\n{cell.kind}, {seeds} seeds", fontsize=9, loc="left")
    axes.set_xlabel("reasoning: right new results")
    axes.set_ylabel(f"recall @{cell.lengths[-1]}")
    low = min([p[0].mean for p in points.values()], default=0.0)
    axes.set_xlim(low - 0.35 * (1.02 - low) - 0.02, 1.02)
    axes.set_ylim(-0.02, 1.04)
    tidy(axes, grid="both")


def _is_drawn(condition: Condition) -> bool:
    training = condition.training
    return training.lora is None or not (training.protect or training.replay or condition.repair.settings())


def _dominates(a: Any, b: Any) -> bool:
    return all(x.mean >= y.mean for x, y in zip(a, b, strict=True)) and any(
        x.mean > y.mean for x, y in zip(a, b, strict=True)
    )


def drift_pairs(cell: Cell, part: str = "routing") -> list[tuple[float, float]]:
    """(drift, recall lost since before fine-tuning) of every full fine-tuning run without replay and repair.

    `part` is whose drift: "routing" (queries and keys) or "all" weights.
    """
    pairs = []
    for name in cell.conditions:
        condition = CONDITIONS.get(name)
        if condition is None or condition.repair.settings() or condition.training.replay or condition.training.lora:
            continue
        for seed, result in cell.results[name].items():
            before: Result | None = cell.results.get(BEFORE, {}).get(seed)
            if before is not None:
                pairs.append((float(result["drift"][part]), cell.recall(before) - cell.recall(result)))
    return pairs


def drift_line(cell: Cell) -> tuple[str, ...] | None:
    """(runs, Pearson and Spearman for queries and keys, the same for all weights), or None with too few runs."""
    texts: list[str] = []
    for part in ("routing", "all"):
        pairs = drift_pairs(cell, part)
        if len({x for x, _ in pairs}) < 3 or len({y for _, y in pairs}) < 3:
            return None
        x, y = zip(*pairs, strict=True)
        texts += [f"{correlation(x, y):.2f}", f"{rank_correlation(x, y):.2f}"]
    return str(len(pairs)), *texts


def drift_plot(cells: Sequence[Cell], path: Path) -> None:
    """Recall lost against drift of queries and keys, a point a run."""
    figure, axes = new_figure(width=7, height=5)
    for cell, colour, marker in zip(cells, COLOURS, "osD^vPX*", strict=False):
        pairs = drift_pairs(cell)
        axes.plot(
            [x for x, _ in pairs],
            [y for _, y in pairs],
            marker,
            color=colour,
            label=f"{cell.title}, {cell.purpose}",
            markersize=5,
        )
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xlabel("drift of queries and keys, ‖W − W₀‖ / ‖W₀‖")
    axes.set_ylabel("recall lost at the longest length")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center")
    tidy(axes, grid="both")
    finish(figure, path)
