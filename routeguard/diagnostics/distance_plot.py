"""Picture of attention distances: every head of every layer, one colour a state of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from routeguard.plots import COLOURS, finish, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeguard.diagnostics.distance import AttentionDistance

_COLUMNS = 4


def plot_distances(states: Mapping[str, AttentionDistance], path: str | Path | None) -> Figure:
    """One panel a layer, heads from left to right, points with intervals; states side by side."""
    first = next(iter(states.values()))
    columns = min(_COLUMNS, len(first.layers))
    rows = -(-len(first.layers) // columns)
    figure, grid = new_figure(
        rows, columns, width=max(5.0, 3.4 * columns), height=2.6 * rows + 0.6, squeeze=False, sharey=True
    )
    panels = list(grid.flat)
    for axes in panels[len(first.layers) :]:
        axes.set_visible(False)
    spread = 0.6 / len(states)
    for axes, layer in zip(panels, first.layers, strict=False):
        for number, (name, state) in enumerate(states.items()):
            found = state.interval(layer)
            shift = (number - (len(states) - 1) / 2) * spread
            axes.errorbar(
                [head + shift for head in range(len(found.mean))],
                found.mean.tolist(),
                yerr=[(found.mean - found.low).tolist(), (found.high - found.mean).tolist()],
                fmt="o",
                markersize=4,
                elinewidth=1,
                color=COLOURS[number % len(COLOURS)],
                label=name or None,
            )
        heads = len(state.values[layer])
        axes.set_title(f"layer {layer}", fontsize=10)
        axes.set_xticks(range(0, heads, 1 if heads <= 8 else 4))
        axes.set_ylim(bottom=0)
        tidy(axes)
    for axes in grid[-1]:
        axes.set_xlabel("head")
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens back")
    if any(states):
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(states), frameon=False
        )
    figure.suptitle(f"Mean attention distance, {first.sample.num_tokens} tokens", x=0.01, ha="left", fontsize=11)
    return finish(figure, path)
