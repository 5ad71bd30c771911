"""The routing picture: maps of attention on one logarithmic colour scale, and a diverging one for the log-ratio."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from routeguard.plots import COLOURS, GREY, finish, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeguard.diagnostics.routing_picture import RoutingPicture

_DECADES = 4  # of probability between the darkest and the brightest colour
_LABEL_POINTS = 11  # height of a row of labels
_LETTER = 0.026  # width of a letter of a label, as a share of a panel
_STRIP = 1.0  # height in inches of the last token's attention, below a map


def plot_routing(picture: RoutingPicture, path: str | Path | None) -> Figure:
    """Query from top to bottom, key from left to right; with marks, the last token's attention below each map."""
    ratio = picture.log_ratio
    panels = len(picture.states) + (ratio is not None)
    labels = _labels(picture)
    num_rows = max((row for _, row in labels.values()), default=-1) + 1
    strips = bool(labels)
    height = 4.2 + num_rows * _LABEL_POINTS / 72 + strips * (_STRIP + 0.4)
    figure, grid = new_figure(
        1 + strips,
        panels,
        width=3.7 * panels + 0.8,
        height=height,
        squeeze=False,
        sharey="row",
        gridspec_kw={"height_ratios": [3.6, _STRIP][: 1 + strips]},
    )
    _maps(picture, figure, grid[0])
    titles = [name or "attention" for name in picture.states] + (["log(restored / after)"] if ratio is not None else [])
    for axes, name in zip(grid[0], titles, strict=True):
        axes.set_xlabel("" if strips and axes is not grid[0][-1] else "key (token)")
        axes.set_facecolor("#f2f2f2")
        axes.set_title(name, fontsize=10, pad=6 + num_rows * _LABEL_POINTS)
        _mark(axes, picture, labels)
    if strips:
        for axes, state in zip(grid[1], picture.states, strict=False):
            _strip(axes, picture, state)
        grid[1][0].set_ylabel("last token's\nattention")
        if ratio is not None:
            grid[1][-1].set_axis_off()
    grid[0][0].set_ylabel("query (token)")
    first = next(iter(picture.states.values()))
    title = f"Layer {first.layer}, head {first.head}, {first.num_tokens} tokens"
    figure.suptitle(title, x=0.01, y=1 - 0.05 / height, ha="left", fontsize=11)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.25 / height))
    return finish(figure, path)


def _maps(picture: RoutingPicture, figure: Figure, row: Any) -> None:
    from matplotlib.colors import LogNorm

    tokens = _num_tokens(picture)
    span = (0, tokens, tokens, 0)
    brightest = max(float(state.values.max()) for state in picture.states.values())
    darkest = brightest * 10**-_DECADES
    norm = LogNorm(darkest, brightest)
    image: Any = None
    for axes, state in zip(row, picture.states.values(), strict=False):
        shown = torch.where(state.values > 0, state.values.clamp_min(darkest), torch.nan)
        image = axes.imshow(shown.numpy(), norm=norm, cmap="magma", extent=span, interpolation="nearest")
    bar = figure.colorbar(image, ax=list(row[: len(picture.states)]), shrink=0.75, pad=0.01)
    bar.ax.set_title(
        "mean\nprobability", fontsize=8, loc="left"
    )  # beside the bar it would read as the next panel's axis
    ratio = picture.log_ratio
    if ratio is not None:
        strong = ratio[~ratio.isnan()].abs()
        limit = max(float(strong.quantile(0.99)) if strong.numel() < 1 << 24 else float(strong.max()), math.log(1.1))
        image = row[-1].imshow(
            ratio.numpy(), vmin=-limit, vmax=limit, cmap="RdBu_r", extent=span, interpolation="nearest"
        )
        figure.colorbar(image, ax=row[-1], shrink=0.75, pad=0.01)


def _mark(axes: Any, picture: RoutingPicture, labels: dict[str, tuple[float, int]]) -> None:
    """Bars along both axes at the marked tokens, with a dotted line down from them, and their names above."""
    tokens = _num_tokens(picture)
    for name, colour in _colours(picture).items():
        start, stop = picture.marks[name]
        middle, width = (start + stop) / 2, max(stop - start, tokens / 150)  # a bar of a few tokens would not be seen
        bar = (middle - width / 2, middle + width / 2)
        line = {"color": colour, "linewidth": 4, "solid_capstyle": "butt", "clip_on": False}
        axes.plot(bar, (1.012, 1.012), transform=axes.get_xaxis_transform(), **line)
        axes.plot((-0.012, -0.012), bar, transform=axes.get_yaxis_transform(), **line)
        axes.plot((middle, middle), (0, middle), color=colour, linewidth=0.9, linestyle=(0, (2, 3)))
        at, row = labels[name]
        axes.annotate(
            name,
            (at, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 5 + row * _LABEL_POINTS),
            textcoords="offset points",
            fontsize=8,
            color=colour,
            ha="center",
            annotation_clip=False,
        )
    axes.set_xlim(0, tokens)
    axes.set_ylim(tokens, 0)


def _strip(axes: Any, picture: RoutingPicture, state: str) -> None:
    """What the last token gives to each token, marked tokens in their colours, with their shares."""
    row = picture.states[state].last_query
    least = 10.0**-_DECADES
    axes.vlines(range(len(row)), least, row.clamp_min(least).tolist(), color=GREY, linewidth=0.6)
    for name, colour in _colours(picture).items():
        span = picture.marks[name]
        heights = row[slice(*span)].clamp_min(least).tolist()
        axes.vlines(range(*span), least, heights, color=colour, linewidth=1.2)
    shares = (f"{name} {picture.received(state, name):.1%}" for name in _colours(picture))
    axes.set_title(",  ".join(shares), fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(least, 1)
    axes.set_xlim(0, len(row))
    axes.set_xlabel("key (token)")
    tidy(axes)


def _labels(picture: RoutingPicture) -> dict[str, tuple[float, int]]:
    """Where the name of each mark stands, and in which row, so that none covers another."""
    tokens, ends, found = _num_tokens(picture), list[float](), {}
    for name in _colours(picture):
        half = _LETTER * tokens * len(name) / 2
        at = min(max(sum(picture.marks[name]) / 2, half), tokens - half)
        row = next((row for row, end in enumerate(ends) if end <= at - half), len(ends))
        ends[row : row + 1] = [at + half]
        found[name] = (at, row)
    return found


def _colours(picture: RoutingPicture) -> dict[str, str]:
    """The marks from left to right, each with its colour."""
    names = sorted(picture.marks, key=lambda name: picture.marks[name])
    return {name: COLOURS[(number + 1) % len(COLOURS)] for number, name in enumerate(names)}


def _num_tokens(picture: RoutingPicture) -> int:
    return next(iter(picture.states.values())).num_tokens
