"""How far adapters moved a weight, from their small factors: the dense update `s·BA` is never formed.

With `M = BᵀB` and `N = AAᵀ` (both r × r), `‖BA‖² = tr(Bᵀ B A Aᵀ) = tr(M N)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.drift.frobenius import compute_dtype, full_precision, row_blocks
from routeguard.routes.collection import Rows

_ROWS_AT_ONCE = 1024


@torch.no_grad()
def lora_delta_distance(a: Tensor, b: Tensor, a0: Tensor, b0: Tensor) -> Tensor:
    """How far a LoRA update moved, `‖BA − B₀A₀‖_F`, in the difference form, from r × r products.

    With `ΔB = B − B₀` and `ΔA = A − A₀` the update changed by `ΔB A + B₀ ΔA`; only that is multiplied out, so small
    changes keep their digits. What is left is a change of the factors that cancels in their product (`B M`, `M⁻¹A`): it
    reads as up to 1e-3 of the size of that change in float32 instead of 0.

    Args:
        a: `[r, in_features]`.
        b: `[out_features, r]`, or the rows of it that count, times PEFT's scaling (`alpha / r`, or `alpha / √r` for
            rsLoRA).
        a0, b0: the same at the start: the initial adapter, also where it is not zero (PiSSA, OLoRA).

    Returns:
        A 0-d float32 tensor on the device of `a`, without a host synchronisation.

    Raises:
        ValueError: shapes that do not fit (also another rank than at the start), or a dtype that is not floating point.

    Source: derived.
    """
    _check_pair(a, b)
    dtype = compute_dtype(a, b, a0, b0)
    if a0.shape != a.shape or b0.shape != b.shape:
        raise ValueError(
            f"the adapter has factors of shape {tuple(a.shape)} and {tuple(b.shape)}, at the start {tuple(a0.shape)} "
            f"and {tuple(b0.shape)}; the start must be of the same adapter and the same rows"
        )
    now_a, start_b = a.to(dtype), b0.to(dtype)
    change_a, change_b = now_a - a0.to(dtype), b.to(dtype) - start_b
    with full_precision(a.device):
        square = (
            (change_b.mT @ change_b) * (now_a @ now_a.mT)
            + (start_b.mT @ start_b) * (change_a @ change_a.mT)
            + 2 * (change_b.mT @ start_b) * (now_a @ change_a.mT)
        ).sum()
    return square.clamp_min(0).sqrt().float()


@torch.no_grad()
def dora_delta_norm(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | Tensor,
    magnitude: Tensor,
    *,
    start_magnitude: Tensor,
    rows: Rows | None = None,
) -> Tensor:
    """How far DoRA moved a weight from its untouched adapter, from the base and the factors.

    DoRA's row i is `m_i · (w_i + δ_i) / n_i` with `δ = s·BA` and `n_i = ‖w_i + δ_i‖`; before training (`B = 0`) it is
    `m⁰_i · w_i / n⁰_i` with `n⁰_i = ‖w_i‖`. The difference is `c_i·w_i + (m_i / n_i)·δ_i`,

        c = ((m − m⁰)·n⁰ − m⁰·(n − n⁰)) / (n·n⁰),    n − n⁰ = (2⟨w, δ⟩ + ‖δ‖²) / (n + n⁰),

    which keeps its digits for small changes; `⟨w_i, δ_i⟩` and `‖δ_i‖²` follow from `W Aᵀ` and `AAᵀ`.

    Args:
        weight: the frozen base, `[out_features, in_features]`, dequantised.
        a, b, scale: `[r, in_features]`, `[out_features, r]` and PEFT's scaling. The initial `b` is taken to be zero:
            for PiSSA or OLoRA starts there is no such short form; compare merged weights instead.
        magnitude: the magnitude vector `m`, `[out_features]`.
        start_magnitude: `m⁰`.
        rows: `(start, stop)` ranges of output rows. None: all. All tensors are whole all the same.

    Returns:
        A 0-d float32 tensor on the device of `weight`, without a host synchronisation. One pass over the base.

    Raises:
        ValueError: shapes or ranges that do not fit, or a dtype that is not floating point.

    Source: derived.
    """
    _check_pair(a, b)
    given = [magnitude, start_magnitude]
    if weight.shape != (b.shape[0], a.shape[1]) or any(m.numel() != b.shape[0] for m in given):
        raise ValueError(
            f"a base of shape {tuple(weight.shape)} and magnitudes of shape {[tuple(m.shape) for m in given]} do not "
            f"fit an update of shape {(b.shape[0], a.shape[1])}"
        )
    dtype = compute_dtype(weight, a, b, *given)
    ranges = rows if rows is not None else ((0, weight.shape[0]),)
    row_blocks(weight, ranges)
    wide_a = a.to(dtype)
    total = torch.zeros((), dtype=dtype, device=weight.device)
    with full_precision(a.device):
        gram = wide_a @ wide_a.mT
        for first, stop in ranges:
            for at in range(first, stop, _ROWS_AT_ONCE):
                part = slice(at, min(stop, at + _ROWS_AT_ONCE))
                m, start_m = (each.reshape(-1)[part].to(dtype) for each in given)
                factor = scale * b[part].to(dtype)
                total += _dora_rows(weight[part].to(dtype), factor, wide_a, gram, m, start_m)
    return total.clamp_min(0).sqrt().float()


def _dora_rows(w: Tensor, factor: Tensor, a: Tensor, gram: Tensor, m: Tensor, start_m: Tensor) -> Tensor:
    """Squared distance of some rows; `factor` is `s·B`."""
    norm_square = w.square().sum(1)
    overlap = ((w @ a.mT) * factor).sum(1)
    delta_square = ((factor @ gram) * factor).sum(1).clamp_min(0)
    start_norm, gain = norm_square.sqrt(), 2 * overlap + delta_square
    norm = (norm_square + gain).clamp_min(0).sqrt()
    tiny = torch.finfo(w.dtype).tiny
    change = (m - start_m) * start_norm - start_m * gain / (norm + start_norm).clamp_min(tiny)
    turn = torch.where(start_norm > 0, change / (norm * start_norm).clamp_min(tiny), torch.zeros_like(norm))
    stretch = m / norm.clamp_min(tiny)
    return (turn.square() * norm_square + 2 * turn * stretch * overlap + stretch.square() * delta_square).sum()


def _check_pair(a: Tensor, b: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise ValueError(
            "LoRA factors must be A [r, in_features] and B [out_features, r]; "
            f"found {tuple(a.shape)} and {tuple(b.shape)}"
        )
