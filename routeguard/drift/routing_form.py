"""Routing drift: how far the logit form `Q Kᵀ` of each query head moved, without ever forming it.

Notation: `Q`, `K` are `d_model × head_dim` per head (the transpose of the rows of an `nn.Linear`), index 0 is the
start, `ΔQ = Q − Q₀`, `ΔK = K − K₀`. Everything follows from one identity that does not cancel for small changes,

    Q Kᵀ − Q₀ K₀ᵀ = ΔQ Kᵀ + Q₀ ΔKᵀ.

Dimensions without a rotary embedding need the `m × m` products `ΔQᵀΔQ`, `ΔQᵀQ₀` and the same of K. A rotary pair is
one complex column `q = q_a + i·q_b`; between tokens at distance δ it adds `Re(exp(iθδ)·q kᴴ)` to the form, so it needs
three inner products on each side. Averaged over the angles of the pairs,

    mean ‖R − R₀‖² = ½ · Σ_pairs ‖q kᴴ − q₀ k₀ᴴ‖² + ‖Q Kᵀ − Q₀ K₀ᵀ‖²  (the second over dimensions without rotary),

and this is what is reported. The ½ matters for partial rotary embeddings only: it cancels when all dimensions turn.
Source: derived (checked against the full forms in float64 by the tests).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from routeguard.drift._products import PairKernel, Products, compiled_pair_kernel, products
from routeguard.drift.frobenius import relative
from routeguard.routes.collection import AttentionLayer

__all__ = ["PairKernel", "RoutingReference", "compiled_pair_kernel", "prepare", "routing_drift"]


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
            "product of its query and key weights is not the logit; measure the factors alone"
        )
    if geometry.num_key_value_heads < 1 or geometry.num_heads % geometry.num_key_value_heads:
        raise ValueError(
            f"layer {geometry.layer} has {geometry.num_heads} query heads, which {geometry.num_key_value_heads} key "
            "heads cannot serve evenly"
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
    kernel: PairKernel | None = None,
) -> Tensor:
    """Relative drift of each query head's logit form, on the device and without a host synchronisation.

    Per head `(mean ‖R − R₀‖² / mean ‖R₀‖²)^½` over rotary angles (see the module's text; without rotary simply
    `‖QKᵀ − Q₀K₀ᵀ‖_F / ‖Q₀K₀ᵀ‖_F`). A change that leaves every logit as it was, such as turning a rotary pair of query
    and key by one angle, gives 0; it is resolved to about 1e-3 of the size of the change in float32, for the query's
    and the key's share cancel. A head whose start is zero reports the plain distance, as `relative` does.

    Cost: with rotary one pass over the tensors when compiled and three when not; without rotary about `4 · head_dim`
    multiplications for each scalar (measured on a CPU: 5 fused AdamW steps for heads of 64, 9 for heads of 128).

    Args:
        query, key, query_bias, key_bias: the current tensors, shaped like those given to `prepare`; a bias is given
            exactly where the reference has one.
        reference: what `prepare` returned for the start.
        kernel: what `compiled_pair_kernel()` returned, to read rotary dimensions once in a fused loop; None for plain
            torch operations.

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
    q = products(query, reference.query, query_bias, reference.query_bias, geometry, "query", kernel)
    k = products(key, reference.key, key_bias, reference.key_bias, geometry, "key", kernel)
    square = _total(_pair_squares(q, k, reference), _gram_terms(q, k, reference))
    return relative(square.clamp_min(0).sqrt(), reference.norms).float()


def _total(pair_squares: Tensor, gram_terms: Tensor) -> Tensor:
    return 0.5 * pair_squares.sum(-1) + gram_terms.sum((-2, -1))


def _pair_squares(q: Products, k: Products, reference: RoutingReference) -> Tensor:
    """`‖Δq kᴴ + q₀ Δkᴴ‖² = |Δq|²|k|² + |q₀|²|Δk|² + 2 Re[(Δqᴴq₀)(Δkᴴk)]`, `[num_heads, pairs]`."""
    key_energy_now = reference.key_energy + 2 * k.overlap_real + k.energy
    mixed = q.overlap_real * (k.overlap_real + k.energy) - q.overlap_imag * k.overlap_imag
    return q.energy * key_energy_now + reference.query_energy * k.energy + 2 * mixed


def _gram_terms(q: Products, k: Products, reference: RoutingReference) -> Tensor:
    """Terms whose sum is `tr(ΔQᵀΔQ KᵀK) + tr(Q₀ᵀQ₀ ΔKᵀΔK) + 2 tr(ΔQᵀQ₀ ΔKᵀK)`, `[num_heads, m, m]`."""
    key_gram_now = reference.key_gram + k.cross + k.cross.mT + k.gram
    return q.gram * key_gram_now + reference.query_gram * k.gram + 2 * q.cross * (k.cross + k.gram).mT


def _start_products(
    query: Tensor, key: Tensor, query_bias: Tensor | None, key_bias: Tensor | None, geometry: AttentionLayer
) -> tuple[Products, Products]:
    """The products of a start with itself: its change from zero."""

    def zero(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_zeros(()).expand_as(tensor)

    if query.device != key.device:
        raise ValueError(f"the query is on {query.device} and the key on {key.device}; use one device")
    return (
        products(query, query.new_zeros(()).expand_as(query), query_bias, zero(query_bias), geometry, "query"),
        products(key, key.new_zeros(()).expand_as(key), key_bias, zero(key_bias), geometry, "key"),
    )


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors)
