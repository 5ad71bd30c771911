"""New values for routed base parameters under each method: put back, interpolate, QK-Pro."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from routeguard.protect.held import Held
from routeguard.protect.modes import QKPro
from routeguard.protect.rows import put_rows, take_rows
from routeguard.restoration.reference import Reference
from routeguard.routes.collection import NORMALISED, AttentionLayer, Route, Routes
from routeguard.routes.names import canonical_name


class Interpolated(NamedTuple):
    """Interpolated values, and what rounding did to them.

    Attributes:
        values: in the tuned dtype.
        num_meant: entries that were meant to move.
        num_kept: those of them that rounding left where they were.
    """

    values: Tensor
    num_meant: int
    num_kept: int

    @property
    def share_kept(self) -> float:
        """Share of the entries meant to move that rounding left where they were, 0 to 1."""
        return self.num_kept / self.num_meant if self.num_meant else 0.0


def interpolated(tuned: Tensor, start: Tensor, alpha: float) -> Interpolated:
    """`(1 − α)·tuned + α·start` in float32 (float64 for float64), cast back to the tuned dtype."""
    wide = torch.promote_types(tuned.dtype, torch.float32)
    start = start.to(tuned.device, wide)
    result = ((1 - alpha) * tuned.to(wide) + alpha * start).to(tuned.dtype)
    meant = start.to(tuned.dtype) != tuned
    kept = meant & (result == tuned)
    return Interpolated(result, int(meant.sum()), int(kept.sum())) if alpha else Interpolated(result, 0, 0)


def qk_pro_values(
    held: Sequence[Held], routes: Routes, reference: Reference, method: QKPro
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """New values of the held rows under QK-Pro, by name: keys and norms at their start, queries from the ridge form.

    Each layer's queries and keys are gathered in head order, also from fused tensors; a bias joins its weight as one
    more input column, since `q = [W b]·[x; 1]` (derived).

    Raises:
        ValueError: a layer where the product of the weights is not the logit (MLA, a convolution, borrowed keys).
    """
    from routeguard.restoration.spectral import qk_pro

    by_name = {piece.name: piece for piece in held}
    whole: dict[str, Tensor] = {}
    for piece in held:
        whole[piece.name] = piece.parameter.detach().clone()
        put_rows(whole[piece.name], piece.rows, _start(reference, piece), piece.dim)
    normalised = False
    for layer in dict.fromkeys(route.layer for route in routes):
        geometry = routes.geometry(layer)
        _refuse_undefined(geometry)
        normalised = normalised or geometry.product_obstacle == NORMALISED
        query = _gather_names([r for r in routes if r.layer == layer and r.role == "query"], geometry)
        key = _gather_names([r for r in routes if r.layer == layer and r.role == "key"], geometry)
        dtype = torch.promote_types(by_name[query["weight"].parameter].parameter.dtype, torch.float32)
        tuned = {r.parameter: by_name[r.parameter].parameter.detach() for r in (*query.values(), *key.values())}
        start = {
            r.parameter: spread(by_name[r.parameter], _start(reference, by_name[r.parameter]))
            for r in (*query.values(), *key.values())
        }
        columns = "bias" in query or "bias" in key
        new = qk_pro(
            _matrix(query, tuned, columns).to(dtype),
            _matrix(query, start, columns).to(dtype),
            _matrix(key, start, columns).to(dtype),
            geometry,
            ridge=method.ridge,
        )
        _scatter(query, new, whole)
    # Without layer numbers: on disk this is called layer by layer, and equal notes are one.
    text = (f"where {NORMALISED}, their product is not quite the logit (as in the paper)",)
    return (
        {piece.name: take_rows(whole[piece.name], piece.rows, piece.dim) for piece in held},
        text if normalised else (),
    )


def refuse_other_roles(routes: Iterable[Route]) -> None:
    """QK-Pro is about queries and keys together. Raises ValueError for any other choice of roles."""
    found = tuple(dict.fromkeys(route.role for route in routes))
    if set(found) != {"query", "key"}:
        raise ValueError(
            f"QK-Pro solves for queries given keys, so roles must be query and key; found {', '.join(found)}. "
            "Use method='qk' for other roles"
        )


def _refuse_undefined(geometry: AttentionLayer) -> None:
    if geometry.product_obstacle not in (None, NORMALISED):
        raise ValueError(
            f"QK-Pro is not defined for layer {geometry.layer} ({geometry.module}): {geometry.product_obstacle}, so "
            "the product of its query and key weights is not the logit. Use method='qk' or 'interpolate' there, or "
            "choose other layers"
        )


def _gather_names(routes: Sequence[Route], geometry: AttentionLayer) -> dict[str, Route]:
    """The weight (and bias) of one role. Raises ValueError unless it is one weight with all the heads' rows."""
    role = routes[0].role if routes else "key"
    weights = [route for route in routes if route.kind == "weight"]
    heads = geometry.num_heads if role == "query" else geometry.num_key_value_heads
    rows = sum(route.num_rows for route in weights)
    if len(weights) != 1 or rows != heads * geometry.head_dim or len(weights[0].shape) != 2:
        found = f"{rows} rows in {[route.parameter for route in weights]}" if weights else "no weight of its own"
        raise ValueError(
            f"QK-Pro needs the {role} rows of layer {geometry.layer} as one weight of {heads} heads x "
            f"{geometry.head_dim} rows; found {found}. Use method='qk' there, or choose other layers"
        )
    biases = [route for route in routes if route.kind == "bias"]
    return {"weight": weights[0], "bias": biases[0]} if biases else {"weight": weights[0]}


def _start(reference: Reference, piece: Held) -> Tensor:
    values = reference.values(canonical_name(piece.name), piece.rows, piece.dim)
    return values.to(piece.parameter.device)


def spread(piece: Held, values: Tensor) -> Tensor:
    """Held rows at their places in a whole tensor of the reference's dtype (the other rows are not read)."""
    whole = torch.zeros(piece.parameter.shape, dtype=values.dtype, device=values.device)
    put_rows(whole, piece.rows, values, piece.dim)
    return whole


def _matrix(role: Mapping[str, Route], tensors: Mapping[str, Tensor], with_bias: bool) -> Tensor:
    """`[heads * head_dim, D]`, or with the bias as a last column."""
    weight = role["weight"]
    matrix = take_rows(tensors[weight.parameter], weight.rows, weight.dim)
    matrix = matrix if weight.dim == 0 else matrix.T
    if not with_bias:
        return matrix
    bias = role.get("bias")
    column = (
        matrix.new_zeros(matrix.shape[0]) if bias is None else take_rows(tensors[bias.parameter], bias.rows, bias.dim)
    )
    return torch.cat([matrix, column[:, None].to(matrix.dtype)], dim=1)


def _scatter(role: Mapping[str, Route], matrix: Tensor, whole: Mapping[str, Tensor]) -> None:
    weight = role["weight"]
    columns = weight.shape[1 - weight.dim]
    values = matrix[:, :columns]
    put_rows(whole[weight.parameter], weight.rows, values if weight.dim == 0 else values.T, weight.dim)
    if "bias" in role:
        put_rows(whole[role["bias"].parameter], role["bias"].rows, matrix[:, columns], role["bias"].dim)
