"""Pictures of curves over distance, on a logarithmic scale with their exponential fits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routeguard.diagnostics.decay_fit import DecayCurve, fit_decay
from routeguard.plots import COLOURS, finish, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from routeguard.diagnostics.autocorrelation import TokenAutocorrelation
    from routeguard.diagnostics.gradient import GradientLocality
    from routeguard.diagnostics.locality import LocalityReport

_BINS = 60
_DECADES = 4  # a logarithmic axis goes this far below the largest value at most


def plot_autocorrelation(measured: TokenAutocorrelation, path: str | Path | None) -> Figure:
    """Both normalisations in one panel."""
    figure, axes = new_figure(width=6.4, height=4.0)
    _draw_data(axes, measured)
    return finish(figure, path)


def plot_gradient(measured: GradientLocality, path: str | Path | None) -> Figure:
    """Every layer in one panel, with the fit of all."""
    figure, axes = new_figure(width=6.4, height=4.0)
    _draw_gradient(axes, measured)
    return finish(figure, path)


def plot_locality(report: LocalityReport, path: str | Path | None) -> Figure:
    """Data on the left; gradient on the right, if there is one."""
    if report.gradient is None:
        return plot_autocorrelation(report.data, path)
    figure, (left, right) = new_figure(1, 2, width=11.0, height=4.2)
    _draw_data(left, report.data)
    _draw_gradient(right, report.gradient)
    return finish(figure, path)


def _draw_data(axes: Any, measured: TokenAutocorrelation) -> None:
    for colour, (name, curve) in zip(
        COLOURS, (("covariance", measured.covariance), ("conditional", measured.conditional)), strict=False
    ):
        _points(axes, curve, name, colour)
        _fit_line(axes, curve, colour)
    axes.set_title(f"Token autocorrelation, {measured.num_tokens:,} tokens", fontsize=10, loc="left")
    _finish_axes(axes, "autocorrelation", [measured.covariance, measured.conditional])


def _draw_gradient(axes: Any, measured: GradientLocality) -> None:
    for number, (layer, curve) in enumerate(measured.curves.items()):
        label = f"layer {layer}" if len(measured.curves) <= 8 else None
        _points(axes, curve, label, COLOURS[number % len(COLOURS)])
    _fit_line(axes, measured.pooled, "black", "all layers: ")
    axes.set_title(
        f"Loss gradient on attention logits, {measured.num_sequences} × {measured.num_tokens} tokens",
        fontsize=10,
        loc="left",
    )
    _finish_axes(axes, "mean |∂L/∂e|", list(measured.curves.values()))


def _points(axes: Any, curve: DecayCurve, label: str | None, colour: str) -> None:
    """The curve in bins of lags that widen with distance, so that the far end is not a cloud."""
    lags, values = _binned(curve)
    above = np.where(values > 0, values, np.nan)  # a logarithmic axis has no place for the rest
    axes.plot(lags, above, "o-", markersize=3, linewidth=0.8, color=colour, label=label)


def _binned(curve: DecayCurve) -> tuple[Any, Any]:
    usable = (curve.lags >= 1) & (curve.counts.sum(0) > 0)
    lags, values = curve.lags[usable], curve.values[usable]
    edges = np.unique(np.geomspace(1, lags[-1] + 1, _BINS).astype(int))
    places = [np.flatnonzero((lags >= a) & (lags < b)) for a, b in itertools.pairwise(edges)]
    places = [place for place in places if len(place)]
    return np.array([lags[p].mean() for p in places]), np.array([values[p].mean() for p in places])


def _fit_line(axes: Any, curve: DecayCurve, colour: str, prefix: str = "") -> None:
    try:
        fit = fit_decay(curve)
    except ValueError:
        return
    lags = np.linspace(fit.first_lag, fit.last_lag, 200)
    error = "" if np.isnan(fit.width_error) else f" ± {fit.width_error:.0f}"
    axes.plot(
        lags,
        [fit.at(lag) for lag in lags],
        "--",
        linewidth=1.4,
        color=colour,
        label=f"{prefix}W = {fit.width_tokens:.0f}{error} tokens",
    )


def _finish_axes(axes: Any, label: str, curves: list[DecayCurve]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    top = max(float(_binned(curve)[1].max()) for curve in curves)
    bottom = min((float(v[v > 0].min()) for v in (_binned(curve)[1] for curve in curves) if (v > 0).any()), default=top)
    axes.set_ylim(max(bottom * 0.7, top * 10**-_DECADES), top * 1.6)
    axes.set_xlabel("distance in tokens")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=8)
    tidy(axes, grid="both")
