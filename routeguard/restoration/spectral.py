"""QK-Pro: bring the logit form back towards its start while staying near the tuned queries.

QK-Pro (QK-Restore paper, section 7.4 and appendix N) asks for the weights nearest to the tuned ones whose product is
the pre-SFT logit form. With the keys fixed at their start, the exact constraint leaves no freedom (the queries have to
be the old ones, which is QK-Restore), so a ridge λ makes it a compromise. In the row-vector convention (`Q`, `K` are
`d_model × head_dim`, `R_pre = Q_pre K_preᵀ`) it is the minimiser of

    ‖Q − Q_post‖² + (1/λ)·‖Q K_preᵀ − R_pre‖²,

    Q_new = Q_post + (Q_pre − Q_post) · G (G + λI)⁻¹,    G = K_preᵀ K_pre  (head_dim × head_dim).

Source of the problem: the paper; of this closed form, its limits and its spectrum: derived, checked by the tests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from routeguard.routes.collection import AttentionLayer


@torch.no_grad()
def qk_pro(query_post: Tensor, query_pre: Tensor, key_pre: Tensor, geometry: AttentionLayer, *, ridge: float) -> Tensor:
    """New query weight of one layer under QK-Pro; the caller sets the keys to `key_pre`.

    Along eigenvector i of a key head's `G`, with eigenvalue `s_i²`, the query is restored by the share
    `s_i² / (s_i² + λ)`. In torch layout a head has `W_new = W_post + G (G + λI)⁻¹ (W_pre − W_post)`: it mixes the rows
    of a head, never its input columns. Limits: `ridge=0` returns `query_pre` bit for bit (QK-Restore), `ridge=inf`
    returns `query_post` (K-Restore, as the keys go back).

    A rotary embedding turns pairs of rows by an angle that depends on the distance between two tokens. This form, like
    the paper's, ignores that: it weighs the error of the logit form at distance 0, and `G` may mix rows of different
    pairs. The closed form is the same with and without rotary. Likewise with QK-norm, where the product of the weights
    is the logit up to the norms: `geometry.product_obstacle` is not looked at, refusing is up to the caller.

    A bias is one more input column: concatenate it to the weight (zeros where only one side has one), and split the
    result.

    Args:
        query_post: tuned query weight, `[num_heads * head_dim, d_model]`.
        query_pre: query weight at the start, same shape.
        key_pre: key weight at the start, `[num_key_value_heads * head_dim, d_model]`. The query heads that share a key
            head share its `G`.
        geometry: gives the numbers of heads and `head_dim`.
        ridge: λ relative to the mean eigenvalue of each key head's `G`; 0 to inf.

    Returns:
        A new tensor in the shape, dtype and device of `query_post`; solved in float64.

    Raises:
        ValueError: a ridge that is negative or NaN, shapes that do not fit, weights that are not finite, or a key head
            that is all zero (its logits are 0 whatever the query, so there is nothing to solve for).

    Source: the paper's section 7.4 and appendix N for the problem, derived for the spectral form.
    """
    if math.isnan(ridge) or ridge < 0:
        raise ValueError(f"ridge must be 0 or more (0 restores fully, inf keeps the tuned queries), found {ridge}")
    heads, groups, width = geometry.num_heads, geometry.num_key_value_heads, geometry.head_dim
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key heads evenly (layer {geometry.layer})")
    _check("query_post", query_post, heads * width, geometry)
    _check("query_pre", query_pre, heads * width, geometry)
    _check("key_pre", key_pre, groups * width, geometry)
    if query_post.shape != query_pre.shape or query_pre.shape[1] != key_pre.shape[1]:
        raise ValueError(
            f"the weights of layer {geometry.layer} read different inputs: query_post {tuple(query_post.shape)}, "
            f"query_pre {tuple(query_pre.shape)}, key_pre {tuple(key_pre.shape)}"
        )
    key = key_pre.to(query_post.device, torch.float64).reshape(groups, width, -1)
    values, vectors = torch.linalg.eigh(key @ key.mT)
    values = values.clamp_min(0)
    mean = values.mean(-1, keepdim=True)
    if not bool((mean > 0).all()):
        empty = [head for head, value in enumerate(mean.flatten().tolist()) if not value > 0]
        raise ValueError(f"key heads {empty} of layer {geometry.layer} are all zero in key_pre: nothing to solve for")
    if ridge == 0:
        return query_pre.to(query_post.device, query_post.dtype, copy=True)
    if math.isinf(ridge):
        return query_post.clone()
    share = values / (values + ridge * mean).clamp_min(torch.finfo(torch.float64).tiny)
    start = query_pre.to(query_post.device, torch.float64)
    shape = (groups, heads // groups, width, -1)
    change = (start - query_post.double()).reshape(shape)
    vectors, share = vectors[:, None], share[:, None, :, None]
    restored: Tensor = vectors @ (share * (vectors.mT @ change))
    return (query_post.double() + restored.reshape(query_post.shape)).to(query_post.dtype)


def _check(name: str, weight: Tensor, rows: int, geometry: AttentionLayer) -> None:
    if weight.ndim != 2 or weight.shape[0] != rows:
        raise ValueError(
            f"{name} of layer {geometry.layer} has shape {tuple(weight.shape)}; its heads of {geometry.head_dim} need "
            f"{rows} rows in torch layout"
        )
    if not weight.is_floating_point():
        raise ValueError(f"{name} of layer {geometry.layer} is {weight.dtype}; dequantise it first")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{name} of layer {geometry.layer} holds NaN or infinite weights")
