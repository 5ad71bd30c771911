"""Small pieces of HTML; every text that goes in is escaped."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape

NUM_SHADES = 11


def text(value: object) -> str:
    return escape(str(value), quote=True)


def paragraph(value: object, kind: str = "") -> str:
    return f"<p{_class(kind)}>{text(value)}</p>"


def bullets(items: Iterable[object], kind: str = "") -> str:
    return f"<ul{_class(kind)}>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A table of two columns, a name and what is known of it."""
    rows = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in pairs)
    return f'<div class="wide"><table class="facts"><tbody>{rows}</tbody></table></div>'


def table(
    caption: str, heads: Sequence[object], rows: Iterable[Sequence[object]], *, words: Container[int] = ()
) -> str:
    """A table with a header row; the first cell of each row is its header, columns of `words` (from 0) begin left."""
    left = [' class="words"' if i in words else "" for i in range(len(heads))]
    head = [f'<th scope="col"{kind}>{text(name)}</th>' for name, kind in zip(heads, left, strict=True)]
    body = [
        [text(row[0]), *(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(row[1:], left[1:], strict=True))]
        for row in rows
    ]
    return _table(caption, head, body)


def shaded(
    caption: str, heads: Sequence[object], rows: Iterable[tuple[object, Sequence[float | None]]], *, top: float
) -> str:
    """A table of numbers from 0 to `top`, each cell shaded by its number; None is an empty cell."""
    head = [f'<th scope="col">{text(name)}</th>' for name in heads]
    body = [[text(name), *(_shade(value, top) for value in values)] for name, values in rows]
    return _table(caption, head, body, kind="heat")


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>"


def _table(caption: str, head: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    body = "".join(f'<tr><th scope="row">{row[0]}</th>{"".join(row[1:])}</tr>' for row in rows)
    return (
        f'<div class="wide"><table{_class(kind)}><caption>{text(caption)}</caption>'
        f"<thead><tr>{''.join(head)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _shade(value: float | None, top: float) -> str:
    if value is None or value != value:
        return "<td></td>"
    shade = min(max(round((NUM_SHADES - 1) * value / top), 0), NUM_SHADES - 1) if top > 0 else 0
    return f'<td class="shade{shade}">{value:.2f}</td>'


def _class(kind: str) -> str:
    return f' class="{text(kind)}"' if kind else ""
