"""A line chart as inline SVG: colours come from the page's style, so that it is legible in the dark and on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from routeguard.report.words import spread

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 680, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_MOST_POINTS = 300


@dataclass(frozen=True)
class Line:
    """One series: points from left to right, drawn solid or dashed, or only as rings (a lone measurement)."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False
    rings: bool = False


def line_chart(lines: Sequence[Line], *, name: str, alt: str, x_label: str, y_label: str, top: float = 0.0) -> str:
    """A figure with the chart and its legend.

    Args:
        lines: the series; numbers that are not finite are left out.
        name: a word for the ids in the page.
        alt: what the picture shows, in words.
        x_label, y_label: of the axes; both begin at 0.
        top: the least that the y axis reaches up to.
    """
    drawn = [(line, spread([p for p in line.points if math.isfinite(p[1])], _MOST_POINTS)) for line in lines]
    largest = max((y for _, points in drawn for _, y in points), default=0.0)
    x_ticks = _ticks(max((x for _, points in drawn for x, _ in points), default=0.0), whole=True)
    y_ticks = _ticks(max(top, largest))
    x_scale = (_WIDTH - _LEFT - _RIGHT) / x_ticks[-1]
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / y_ticks[-1]
    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{name}-alt">'
        f'<title id="{name}-alt">{escape(alt)}</title>'
    ]
    for tick in y_ticks:
        y = bottom - tick * y_scale
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x = _LEFT + tick * x_scale
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_label)}</text>"
    )
    for line, points in drawn:
        places = [(_LEFT + x * x_scale, bottom - y * y_scale) for x, y in points]
        kind = f"line colour{line.colour % NUM_COLOURS}{' dashed' if line.dashed else ''}"
        if not line.rings and len(places) > 1:
            parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        if line.rings or len(places) <= 40:
            radius = 6 if line.rings else 2.5
            parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in places]
    parts.append("</svg>")
    legend = "".join(f"<li>{_sample(line)}{escape(line.label)}</li>" for line in lines)
    return f'<figure>{"".join(parts)}<figcaption><ul class="legend">{legend}</ul></figcaption></figure>'


def _sample(line: Line) -> str:
    kind = f"line colour{line.colour % NUM_COLOURS}{' dashed' if line.dashed else ''}"
    mark = f'<circle class="{kind}" cx="14" cy="6" r="4.5"/>' if line.rings else f'<path class="{kind}" d="M1 6H27"/>'
    return f'<svg class="sample" viewBox="0 0 28 12" aria-hidden="true">{mark}</svg>'


def _ticks(top: float, *, whole: bool = False) -> list[float]:
    """From 0 to `top` or a little beyond, four to eight round steps."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]
