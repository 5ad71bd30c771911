"""The routing picture: maps of attention on one logarithmic colour scale, and a diverging one for the log-ratio."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from routeguard.diagnostics.plots import finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeguard.diagnostics.routing_picture import RoutingPicture

_DECADES = 4  # of probability between the darkest and the brightest colour


def plot_routing(picture: RoutingPicture, path: str | Path | None) -> Figure:
    """Query from top to bottom, key from left to right."""
    ratio = picture.log_ratio
    panels = len(picture.states) + (ratio is not None)
    figure, grid = new_figure(1, panels, width=3.7 * panels + 0.8, height=4.2, squeeze=False, sharey=True)
    from matplotlib.colors import LogNorm

    first = next(iter(picture.states.values()))
    span = (0, first.num_tokens, first.num_tokens, 0)
    brightest = max(float(state.values.max()) for state in picture.states.values())
    darkest = brightest * 10**-_DECADES
    norm = LogNorm(darkest, brightest)
    image: Any = None
    for axes, (name, state) in zip(grid[0], picture.states.items(), strict=False):
        shown = torch.where(state.values > 0, state.values.clamp_min(darkest), torch.nan)
        image = axes.imshow(shown.numpy(), norm=norm, cmap="magma", extent=span, interpolation="nearest")
        _label(axes, name or "attention", picture)
    figure.colorbar(image, ax=list(grid[0][: len(picture.states)]), shrink=0.75, label="mean probability", pad=0.01)
    if ratio is not None:
        axes = grid[0][-1]
        strong = ratio[~ratio.isnan()].abs()
        limit = max(float(strong.quantile(0.99)) if strong.numel() < 1 << 24 else float(strong.max()), math.log(1.1))
        image = axes.imshow(ratio.numpy(), vmin=-limit, vmax=limit, cmap="RdBu_r", extent=span, interpolation="nearest")
        _label(axes, "log(restored / after)", picture)
        figure.colorbar(image, ax=axes, shrink=0.75, pad=0.01)
    grid[0][0].set_ylabel("query (token)")
    title = f"Layer {first.layer}, head {first.head}, {first.num_tokens} tokens"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return finish(figure, path)


def _label(axes: Any, title: str, picture: RoutingPicture) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("key (token)")
    axes.set_facecolor("#f2f2f2")
    for name, token in picture.marks.items():
        axes.annotate(
            name,
            (token, 0),
            xytext=(token, picture_height(picture) * 0.12),
            fontsize=8,
            ha="center",
            arrowprops={"arrowstyle": "->", "linewidth": 0.8},
        )


def picture_height(picture: RoutingPicture) -> int:
    """Tokens from top to bottom."""
    return next(iter(picture.states.values())).num_tokens
