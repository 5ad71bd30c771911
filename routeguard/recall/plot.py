"""Recall by depth and length, as a heatmap."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from routeguard.plots import finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeguard.recall.result import RecallResult


def draw_recall(
    result: RecallResult, path: str | Path | None = None, *, task: str | None = None, bins: int = 5
) -> Figure:
    """Draw a heatmap a task: length across, depth down, the share of right values in each cell.

    Args:
        result: what was measured.
        path: where to save the picture (PNG, SVG, PDF by its ending); None: nowhere.
        task: one task only.
        bins: how many parts the context is cut into.

    Raises ValueError for a task that was not measured, NoMatplotlibError without matplotlib.
    """
    if task is not None and task not in result.tasks:
        raise ValueError(f"task {task!r} was not measured; there are {', '.join(result.tasks)}")
    tasks = result.tasks if task is None else (task,)
    lengths = result.lengths
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    width = max(2.4 + 0.75 * len(lengths), 4.0)
    height = 0.55 * bins * rows + 1.5 * rows + 0.4
    figure, grid = new_figure(rows, columns, width=width * columns + 1.0, height=height, squeeze=False)
    image = None
    for number, axes in enumerate(grid.flat):
        if number >= len(tasks):
            axes.set_axis_off()
            continue
        found = result.by_depth(bins, task=tasks[number])
        cells = [[found.get((length, depth), (float("nan"), 0))[0] for length in lengths] for depth in range(bins)]
        image = axes.imshow(cells, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for depth, row in enumerate(cells):
            for column, value in enumerate(row):
                if value == value:
                    colour = "white" if value < 0.5 else "black"
                    axes.text(column, depth, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(lengths)), [short_length(length) for length in lengths])
        axes.set_yticks(range(bins), [f"{100 * d // bins}–{100 * (d + 1) // bins} %" for d in range(bins)])
        axes.set_title(tasks[number], fontsize=10)
        axes.set_xlabel("context length (tokens)")
        if number % columns == 0:
            axes.set_ylabel("depth of the value")
    assert image is not None
    figure.colorbar(image, ax=list(grid.flat), label="share of values recalled", shrink=0.9)
    return finish(figure, path)


def short_length(tokens: int) -> str:
    """4096 as "4k", other numbers as they are."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
