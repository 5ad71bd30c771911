"""Routes as text: one line a layer, and what was left out."""

from __future__ import annotations

from itertools import groupby

from routeguard.routes.collection import AttentionLayer, Route, Routes


def describe_routes(routes: Routes) -> str:
    """A table: layer, role, parameter, rows, and a closing summary with parameters, bytes and share of the model."""
    lines = [
        f"{routes.model_type}: {len(routes.layers)} of {len(routes.layer_kinds)} layers attend fully: "
        f"{', '.join(map(str, routes.layers)) or 'none covered'}"
    ]
    for layer, group in groupby(routes.routes, key=lambda route: route.layer):
        members = list(group)
        tied = members[0].tied_layers
        geometry = next((a for a in routes.attention if a.layer == layer), None)
        heads = f" ({_heads(geometry)})" if geometry else ""
        lines.append(f"  layer {layer}{heads}" + (f", also used by layers {', '.join(map(str, tied))}" if tied else ""))
        lines += [f"    {_describe(route)}" for route in members]
    lines.append(
        f"{routes.num_parameters:,} parameters, {format_bytes(routes.num_bytes)}, {routes.share:.2%} of the model"
    )
    lines += [f"note: {note}" for note in routes.notes]
    return "\n".join(lines)


def format_bytes(count: int) -> str:
    """12345678 → "11.8 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def format_rows(route: Route) -> str:
    """Which rows a route is: "all 64 rows", "rows 0-15, 32-47 (32 of 64)"."""
    total = route.shape[route.dim]
    what = "rows" if route.dim == 0 else "columns" if len(route.shape) == 2 else f"rows of dim {route.dim}"
    if route.rows is None:
        return f"all {total} {what}"
    shown = ", ".join(f"{start}-{stop - 1}" for start, stop in route.rows[:3])
    more = f", ... {len(route.rows)} ranges" if len(route.rows) > 3 else ""
    return f"{what} {shown}{more} ({route.num_rows} of {total})"


def _describe(route: Route) -> str:
    marks = [mark for mark, on in (("shared with values", route.shared), ("sparse", route.sparse)) if on]
    return f"{route.role:6} {route.kind:6} {route.parameter}: {format_rows(route)}" + (
        f" [{', '.join(marks)}]" if marks else ""
    )


def _heads(geometry: AttentionLayer) -> str:
    rotary = f", rotary {geometry.rotary_dim} {geometry.rotary_pairing}" if geometry.rotary_dim else ", no rotary"
    if geometry.product_obstacle and "probe" in geometry.product_obstacle:
        rotary = ""  # not known
    norm = ", QK-norm" if geometry.qk_norm else ""
    heads = f"{geometry.num_heads} query heads, {geometry.num_key_value_heads} key heads"
    return f"{heads}, width {geometry.head_dim}{rotary}{norm}"
