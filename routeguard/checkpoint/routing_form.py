"""The drift of the logit form between two checkpoints on disk, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from routeguard.checkpoint.row_plan import RowRestore
from routeguard.checkpoint.tensors import read_tensor
from routeguard.drift.routing_form import prepare, routing_drift
from routeguard.routes.collection import Routes
from routeguard.storage.row_bytes import Slice


def routing_forms(rows: Sequence[RowRestore], routes: Routes) -> tuple[dict[int, tuple[float, ...]], list[str]]:
    """Layer to the relative drift of each query head's logit form, and notes on the layers that have none."""
    found: dict[int, tuple[float, ...]] = {}
    reasons: dict[str, list[int]] = {}
    for geometry in routes.attention:
        mine = [row for row in rows if row.route.layer == geometry.layer]
        query, key = _only(mine, "query", "weight"), _only(mine, "key", "weight")
        if geometry.product_obstacle or query is None or key is None:
            why = geometry.product_obstacle or "queries and keys are not one weight each here"
            reasons.setdefault(why, []).append(geometry.layer)
            continue
        query_bias, key_bias = _only(mine, "query", "bias"), _only(mine, "key", "bias")
        reference = prepare(
            _rows_first(query.start),
            _rows_first(key.start),
            geometry,
            query_bias=None if query_bias is None else _rows_first(query_bias.start),
            key_bias=None if key_bias is None else _rows_first(key_bias.start),
        )
        drift = routing_drift(
            _rows_first(query.tuned),
            _rows_first(key.tuned),
            reference,
            query_bias=None if query_bias is None else _rows_first(query_bias.tuned),
            key_bias=None if key_bias is None else _rows_first(key_bias.tuned),
        )
        found[geometry.layer] = tuple(drift.tolist())
    return found, [f"no logit form in layers {layers}: {why}" for why, layers in reasons.items()]


def _only(rows: Sequence[RowRestore], role: str, kind: str) -> RowRestore | None:
    found = [row for row in rows if row.route.role == role and row.route.kind == kind]
    return found[0] if len(found) == 1 else None


def _rows_first(part: Slice) -> Tensor:
    tensor = read_tensor(part)
    return tensor if part.dim == 0 or tensor.ndim == 1 else tensor.T
