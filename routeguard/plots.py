"""What every picture of the package shares: matplotlib on demand, colours, tidy axes, writing to a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito: distinguishable with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
GREY = "#999999"


class NoMatplotlibError(ValueError, ImportError):
    """matplotlib, which pictures are drawn with, is not installed."""

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'routeguard[plots]'")


def check_plot(path: str | Path | None) -> None:
    """Raise ValueError where a picture cannot be written to `path`: no matplotlib, or an unknown kind of file."""
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise NoMatplotlibError from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix not in kinds:
        raise ValueError(f"{path} has no suffix of a picture; there are {', '.join(f'.{kind}' for kind in kinds)}")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; give a file to write the picture to")


def new_figure(rows: int = 1, columns: int = 1, *, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure of `width` × `height` inches with axes, without touching the global state of pyplot.

    Raises NoMatplotlibError, a ValueError, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlibError from None
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def tidy(axes: Axes, *, grid: Literal["both", "x", "y"] = "y") -> None:
    """Light grid behind the data, no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)


def finish(figure: Figure, path: str | Path | None) -> Figure:
    """Write the figure to `path` (its folder is made) if there is one, and return it."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
