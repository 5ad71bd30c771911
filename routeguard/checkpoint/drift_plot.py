"""Draw a `CheckpointDrift`: for each role a heat map of layers by heads, and the drift of each layer beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from routeguard.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeguard.checkpoint.drift import CheckpointDrift


def plot_drift(drift: CheckpointDrift) -> Figure:
    """One row of panels: heads by layer for each role, then one line a role over the layers.

    Raises ValueError when matplotlib is not installed.
    """
    weights = [entry for entry in drift.tensors if entry.kind == "weight"]
    roles = list(dict.fromkeys(entry.role for entry in weights))
    with_heads = [role for role in roles if any(entry.heads for entry in weights if entry.role == role)]
    panels = len(with_heads) + 1
    figure, axes = new_figure(1, panels, width=3.6 * panels + 0.8, height=3.6, squeeze=False)
    top = max((value for entry in weights for value in entry.heads if value is not None), default=1.0) or 1.0
    for axis, role in zip(axes[0], with_heads, strict=False):
        entries = [entry for entry in weights if entry.role == role and entry.heads]
        grid = np.full((len(entries), max(len(entry.heads) for entry in entries)), np.nan)
        for row, entry in enumerate(entries):
            grid[row, : len(entry.heads)] = [np.nan if value is None else value for value in entry.heads]
        image = axis.imshow(grid, aspect="auto", vmin=0, vmax=top, cmap="viridis", interpolation="nearest")
        axis.set(title=f"{role} heads", xlabel="head", ylabel="layer")
        axis.set_yticks(range(len(entries)), [str(entry.layer) for entry in entries])
        axis.xaxis.get_major_locator().set_params(integer=True)
        if role == with_heads[-1]:
            figure.colorbar(image, ax=axis)
    last = axes[0, -1]
    for role in roles:
        points = [(entry.layer, entry.drift) for entry in weights if entry.role == role and entry.drift is not None]
        last.plot([layer for layer, _ in points], [value for _, value in points], marker="o", label=role)
    last.set(
        title="whole layers",
        xlabel="layer",
        ylabel="relative drift ‖W − W₀‖ / ‖W₀‖",
        ylim=(0, 1.1 * last.get_ylim()[1]),
    )
    last.xaxis.get_major_locator().set_params(integer=True)
    last.grid(alpha=0.3)
    last.legend()
    return figure
