"""The table of architectures as a page of the documentation: `python -m routeguard.routes.document`."""

from __future__ import annotations

import textwrap

from routeguard.routes.architecture import Architecture
from routeguard.routes.layer_kinds import LONG_RANGE
from routeguard.routes.layouts import LAYOUTS
from routeguard.routes.model_types import LATENT, PLAIN
from routeguard.routes.table import architectures

_INTRODUCTION = """\
# Where routing lives

This page is written by `python -m routeguard.routes.document` from the table that `find_routes` reads; a test checks
that it is current.

A layer counts when it attends to the whole context: kinds {kinds}. Sparse layers attend globally to what a top-k
indexer or a compression keeps; their query and key rows are included and marked, the indexer is left out. Sliding,
chunked, linear, cross-attention, state-space and convolution layers stay out, and so does everything outside the
text decoder.

By default a route is a row of a weight or bias on which the queries or keys depend and the values do not.
`shared=True` adds rows that feed the values as well (latents, keys that are the values); `norms=True` adds the gains of
query and key norms and what shapes the logits in other ways (sinks, relative biases, temperatures).

A model type that is not listed is read by its config and the names of its tensors, and the answer says that it is
unverified: check it with `routeguard.verify(model)`. If that does not fit, the rows are found by differentiating one
forward pass. A row is added in one call:
`routeguard.register_architecture(Architecture((\"my_type\",), aliases={{\"seek\": \"q_proj\"}}))`.

## Rows of their own

`rotary` says which layers turn queries and keys: all of them unless noted, pairs half a head apart unless interleaved.

"""


def document() -> str:
    """The page as Markdown."""
    plain = {frozenset(PLAIN), frozenset(LATENT)}
    rows = [row for row in architectures() if frozenset(row.model_types) not in plain]
    lines = [_INTRODUCTION.format(kinds=" and ".join(f'"{kind}"' for kind in LONG_RANGE))]
    lines.append(
        "| model types | layout | rotary | also shapes the logits (`norms=True`) | note |\n|---|---|---|---|---|\n"
    )
    lines += [_row(row) for row in rows]
    lines.append("\n## Layouts\n\n")
    lines += [f"- `{name}`: {_first_line(layout.__doc__)}\n" for name, layout in LAYOUTS.items() if layout.__doc__]
    lines.append("\n## Nothing unusual\n\nSeparate query and key projections:\n\n" + _wrapped(PLAIN))
    lines.append("\nMulti-head latent attention:\n\n" + _wrapped(LATENT))
    return "".join(lines)


def _row(row: Architecture) -> str:
    layout = row.layout if isinstance(row.layout, str) else row.layout.__name__
    position = {"always": "", "never": "none", "rotates": "by no_rope_layers"}.get(
        row.position.__name__, row.position.__name__.replace("_", " ")
    )
    rotary = ", ".join(part for part in (position, row.pairing if row.pairing != "half" else "") if part)
    beside = f"{row.beside} beside attention in every layer" if row.beside else ""
    note = "; ".join(part for part in (row.note, beside, row.obstacle or "", "tied blocks" if row.tied else "") if part)
    types = ", ".join(f"`{name}`" for name in row.model_types)
    extra = ", ".join(f"`{name}`" for name in row.auxiliary)
    return f"| {types} | `{layout}` | {rotary} | {extra} | {note} |\n"


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _wrapped(names: tuple[str, ...]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 118, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    print(document(), end="")
