"""Routing drift: how far the logit form `Q Kᵀ` of each query head moved, without ever forming it.

Notation: `Q`, `K` are `d_model × head_dim` per head (the transpose of the rows of an `nn.Linear`), index 0 is the start,
`ΔQ = Q − Q₀`, `ΔK = K − K₀`. Everything follows from one identity that does not cancel for small changes,

    Q Kᵀ − Q₀ K₀ᵀ = ΔQ Kᵀ + Q₀ ΔKᵀ.

Dimensions without a rotary embedding need the `m × m` products `ΔQᵀΔQ`, `ΔQᵀQ₀` and the same of K. A rotary pair is one
complex column `q = q_a + i·q_b`; between tokens at distance δ it adds `Re(exp(iθδ)·q kᴴ)` to the form, so it needs three
inner products on each side. Averaged over the angles of the pairs,

    mean ‖R − R₀‖² = ½ · Σ_pairs ‖q kᴴ − q₀ k₀ᴴ‖² + ‖Q Kᵀ − Q₀ K₀ᵀ‖²  (the second over dimensions without rotary),

and this is what is reported. The ½ matters for partial rotary embeddings only: it cancels when all dimensions turn.
Source: derived (checked against the full forms in float64 by the tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from routeguard.drift.frobenius import compute_dtype, relative
from routeguard.routes.collection import AttentionLayer

# Scalars handled at once: about one head, so that the difference is still in the cache for the inner products.
_CHUNK_CPU = 1 << 17
_CHUNK_ACCELERATOR = 1 << 24


@dataclass(frozen=True)
class RoutingReference:
    """The start of one layer's routing, as `prepare` leaves it: its tensors and what never has to be computed again.

    The tensors are kept, not copied; `routing_drift` refuses if they were changed in place since.

    Attributes:
        geometry: heads and rotary layout of the layer.
        query: `[num_heads * head_dim, d_model]` at the start.
        key: `[num_key_value_heads * head_dim, d_model]` at the start.
        query_bias, key_bias: one number a row, or None.
        query_energy: `|q₀|²` for each query head and rotary pair, `[num_heads, pairs]`.
        key_energy: `|k₀|²`, the same for the key head of every query head, `[num_heads, pairs]`.
        query_gram: `Q₀ᵀQ₀` of the dimensions without rotary, `[num_heads, m, m]`.
        key_gram: `K₀ᵀK₀`, the same for the key head of every query head, `[num_heads, m, m]`.
        norms: `‖R₀‖` for each query head, `[num_heads]`.
        versions: in-place change counters of the tensors when they were taken.
    """

    geometry: AttentionLayer
    query: Tensor
    key: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    query_energy: Tensor
    key_energy: Tensor
    query_gram: Tensor
    key_gram: Tensor
    norms: Tensor
    versions: tuple[int, ...]


@torch.no_grad()
def prepare(
    start_query: Tensor,
    start_key: Tensor,
    geometry: AttentionLayer,
    *,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> RoutingReference:
    """Take the start of a layer as the reference of its routing drift.

    Args:
        start_query: query weight at the start, `[num_heads * head_dim, d_model]` (torch layout, any strides) or
            `[num_heads, head_dim, d_model]`. Not copied: pass a clone of a parameter that is being trained.
        start_key: key weight at the start, `[num_key_value_heads * head_dim, d_model]`, or with the heads apart.
        geometry: heads and rotary layout.
        query_bias, key_bias: biases at the start, one number a row, or None. A bias is treated as one more input
            column, the weight of an input that is always 1.

    Raises:
        ValueError: `geometry.product_obstacle` is set (the product of the weights is not the logit), or shapes, heads,
            devices or dtypes do not fit.

    Source: derived.
    """
    if geometry.product_obstacle is not None:
        raise ValueError(
            f"layer {geometry.layer} ({geometry.module}) has no routing form: {geometry.product_obstacle}, so the "
            "product of its query and key weights is not the logit; measure the factors with relative_drift instead"
        )
    if geometry.num_key_value_heads < 1 or geometry.num_heads % geometry.num_key_value_heads:
        raise ValueError(
            f"layer {geometry.layer} has {geometry.num_heads} query heads, which {geometry.num_key_value_heads} key heads "
            "cannot share evenly"
        )
    if geometry.rotary_dim % 2 or not 0 <= geometry.rotary_offset <= geometry.head_dim - geometry.rotary_dim:
        raise ValueError(
            f"layer {geometry.layer} has {geometry.rotary_dim} rotary dimensions from {geometry.rotary_offset} on, "
            f"which are no pairs within a head of {geometry.head_dim}"
        )
    queries, keys = _start_products(start_query, start_key, query_bias, key_bias, geometry)
    square = _total(queries.energy * keys.energy, queries.gram * keys.gram)
    return RoutingReference(
        geometry=geometry,
        query=start_query,
        key=start_key,
        query_bias=query_bias,
        key_bias=key_bias,
        query_energy=queries.energy,
        key_energy=keys.energy,
        query_gram=queries.gram,
        key_gram=keys.gram,
        norms=square.sqrt(),
        versions=_versions(start_query, start_key, query_bias, key_bias),
    )


@torch.no_grad()
def routing_drift(
    query: Tensor,
    key: Tensor,
    reference: RoutingReference,
    *,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Relative drift of each query head's logit form, on the device and without a host synchronisation.

    Per head `(mean ‖R − R₀‖² / mean ‖R₀‖²)^½` over rotary angles (see the module's text; without rotary simply
    `‖QKᵀ − Q₀K₀ᵀ‖_F / ‖Q₀K₀ᵀ‖_F`). A change that leaves every logit as it was, such as turning a rotary pair of query
    and key by one angle, gives 0; it is resolved to about 1e-3 of the size of the change in float32, for the query's
    and the key's share cancel. A head whose start is zero reports the plain distance, as `relative_drift` does.

    Cost: with rotary, two passes over the weights; without, about `4 · head_dim` multiplications for each scalar.

    Args:
        query, key, query_bias, key_bias: the current tensors, shaped like those given to `prepare`; a bias is given
            exactly where the reference has one.
        reference: what `prepare` returned for the start.

    Returns:
        `[num_heads]`, float32.

    Raises:
        ValueError: shapes, devices, dtypes or biases that do not fit the reference, or a reference whose tensors were
            changed in place since `prepare`.

    Source: derived.
    """
    geometry = reference.geometry
    if _versions(reference.query, reference.key, reference.query_bias, reference.key_bias) != reference.versions:
        raise ValueError(
            f"the start tensors of layer {geometry.layer} were changed in place after prepare(), so they are no start; "
            "give prepare() a clone of parameters that are being trained"
        )
    q = _products(query, reference.query, query_bias, reference.query_bias, geometry, "query")
    k = _products(key, reference.key, key_bias, reference.key_bias, geometry, "key")
    square = _total(_pair_squares(q, k, reference), _gram_terms(q, k, reference))
    return relative(square.clamp_min(0).sqrt(), reference.norms).float()


@dataclass(frozen=True)
class _Products:
    """Inner products over the inputs of one side, between its change `d` and its start `z`, for each query head.

    Attributes:
        energy: `|d|²` of each rotary pair, `[num_heads, pairs]`.
        overlap_real, overlap_imag: `zᴴd` of each rotary pair, `[num_heads, pairs]`.
        gram, cross: `dᵀd` and `dᵀz` of the dimensions without rotary, `[num_heads, m, m]`.
    """

    energy: Tensor
    overlap_real: Tensor
    overlap_imag: Tensor
    gram: Tensor
    cross: Tensor


def _total(pair_squares: Tensor, gram_terms: Tensor) -> Tensor:
    return 0.5 * pair_squares.sum(-1) + gram_terms.sum((-2, -1))


def _pair_squares(q: _Products, k: _Products, reference: RoutingReference) -> Tensor:
    """`‖Δq kᴴ + q₀ Δkᴴ‖² = |Δq|²|k|² + |q₀|²|Δk|² + 2 Re[(Δqᴴq₀)(Δkᴴk)]`, `[num_heads, pairs]`."""
    key_energy_now = reference.key_energy + 2 * k.overlap_real + k.energy
    mixed = q.overlap_real * (k.overlap_real + k.energy) - q.overlap_imag * k.overlap_imag
    return q.energy * key_energy_now + reference.query_energy * k.energy + 2 * mixed


def _gram_terms(q: _Products, k: _Products, reference: RoutingReference) -> Tensor:
    """Terms whose sum is `tr(ΔQᵀΔQ KᵀK) + tr(Q₀ᵀQ₀ ΔKᵀΔK) + 2 tr(ΔQᵀQ₀ ΔKᵀK)`, `[num_heads, m, m]`."""
    key_gram_now = reference.key_gram + k.cross + k.cross.mT + k.gram
    return q.gram * key_gram_now + reference.query_gram * k.gram + 2 * q.cross * (k.cross + k.gram).mT


def _start_products(
    query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None, geometry: AttentionLayer
) -> tuple[_Products, _Products]:
    """The products of a start with itself: its change from zero."""

    def zero(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_zeros(()).expand_as(tensor)

    if query.device != key.device:
        raise ValueError(f"the query is on {query.device} and the key on {key.device}; use one device")
    return (
        _products(query, query.new_zeros(()).expand_as(query), query_bias, zero(query_bias), geometry, "query"),
        _products(key, key.new_zeros(()).expand_as(key), key_bias, zero(key_bias), geometry, "key"),
    )


def _products(
    weight: Tensor,
    start: Tensor,
    bias: Tensor | None,
    start_bias: Tensor | None,
    geometry: AttentionLayer,
    role: str,
) -> _Products:
    heads = geometry.num_heads if role == "query" else geometry.num_key_value_heads
    square, overlap, gram, cross = _inner_by_kind(_heads(weight, start, heads, geometry, role), geometry)
    if (bias is None) != (start_bias is None):
        found, other = ("none now", "at the start") if bias is None else ("one now", "none at the start")
        raise ValueError(f"the {role} bias of layer {geometry.layer} must be given both times: {found}, {other}")
    if bias is not None and start_bias is not None:
        columns = _heads(bias[..., None], start_bias[..., None], heads, geometry, f"{role} bias")
        more = _inner_by_kind(columns, geometry)
        square, overlap, gram, cross = square + more[0], overlap + more[1], gram + more[2], cross + more[3]
    group = geometry.num_heads // heads
    return _Products(
        energy=_shared(square[..., 0, 0] + square[..., 1, 1], group),
        overlap_real=_shared(overlap[..., 0, 0] + overlap[..., 1, 1], group),
        overlap_imag=_shared(overlap[..., 1, 0] - overlap[..., 0, 1], group),
        gram=_shared(gram[:, 0], group),
        cross=_shared(cross[:, 0], group),
    )


def _shared(tensor: Tensor, group: int) -> Tensor:
    """One entry for each query head of the group that shares a key head."""
    return tensor if group == 1 else tensor.repeat_interleave(group, 0, output_size=group * tensor.shape[0])


def _heads(
    current: Tensor, start: Tensor, heads: int, geometry: AttentionLayer, role: str
) -> tuple[Tensor, Tensor]:
    """Both tensors as `[heads, head_dim, inputs]` views."""
    flat, apart = (heads * geometry.head_dim,), (heads, geometry.head_dim)
    if tuple(current.shape[:-1]) not in (flat, apart):
        raise ValueError(
            f"the {role} of layer {geometry.layer} has shape {tuple(current.shape)}; its {heads} heads of "
            f"{geometry.head_dim} need {flat[0]} rows in torch layout (transpose a Conv1D weight, select the rows of a "
            "fused one)"
        )
    if start.shape != current.shape or start.device != current.device:
        raise ValueError(
            f"the {role} of layer {geometry.layer} has shape {tuple(current.shape)} on {current.device}, its start has "
            f"{tuple(start.shape)} on {start.device}; pass the same rows on the same device"
        )
    return current.reshape(*apart, current.shape[-1]), start.reshape(*apart, start.shape[-1])


def _inner_by_kind(tensors: tuple[Tensor, Tensor], geometry: AttentionLayer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`d dᵀ` and `d zᵀ` within each rotary pair `[heads, pairs, 2, 2]`, then without rotary `[heads, 1, m, m]`."""
    first = geometry.rotary_offset if geometry.rotary_dim else 0
    last = first + geometry.rotary_dim

    def paired(tensor: Tensor) -> Tensor:
        turned, pairs = tensor[:, first:last], geometry.rotary_dim // 2
        if geometry.rotary_pairing == "half":
            return turned.unflatten(1, (2, pairs)).transpose(1, 2)
        return turned.unflatten(1, (pairs, 2))

    def unpaired(tensor: Tensor) -> Tensor:
        sides = [side for side in (tensor[:, :first], tensor[:, last:]) if side.shape[1]]
        return (sides[0] if len(sides) == 1 else torch.cat(sides or [tensor[:, :0]], dim=1))[:, None]

    current, start = tensors
    return *_inner(paired(current), paired(start)), *_inner(unpaired(current), unpaired(start))


def _inner(current: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`d dᵀ` and `d zᵀ` over the last dimension of `[heads, blocks, rows, inputs]`, with d = current − start, z = start.

    Works on a cache-sized part at a time. Returns two `[heads, blocks, rows, rows]` tensors.
    """
    heads, blocks, rows, inputs = current.shape
    dtype = compute_dtype(current, start)
    square, cross = (torch.empty(heads, blocks, rows, rows, dtype=dtype, device=current.device) for _ in range(2))
    if not square.numel():
        return square, cross
    chunk = _CHUNK_CPU if current.device.type == "cpu" else _CHUNK_ACCELERATOR
    num_blocks = min(blocks, max(1, chunk // (rows * inputs)))
    num_heads = max(1, chunk // (blocks * rows * inputs)) if num_blocks == blocks else 1
    for head in range(0, heads, num_heads):
        for block in range(0, blocks, num_blocks):
            part = slice(head, head + num_heads), slice(block, block + num_blocks)
            z = start[part].to(dtype)
            d = current[part] - z if current.dtype == dtype else current[part].to(dtype).sub_(z)
            d, z = d.reshape(-1, rows, inputs), z.reshape(-1, rows, inputs)
            torch.bmm(d, d.mT, out=square[part].view(-1, rows, rows))
            torch.bmm(d, z.mT, out=cross[part].view(-1, rows, rows))
    return square, cross


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors)
