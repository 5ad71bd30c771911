"""Inner products between the change of a projection and its start, per head: what the routing form is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from routeguard.drift.frobenius import compiled_or_none, compute_dtype, full_precision
from routeguard.routes.collection import AttentionLayer

# Scalars handled at once: about one head, so that the difference is still in the cache for the inner products.
_CHUNK_CPU = 1 << 17
_CHUNK_ACCELERATOR = 1 << 22


@dataclass(frozen=True)
class Products:
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


# Two tensors [heads, pairs, 2, inputs] of one dtype, now and at the start, to energy, overlap_real and overlap_imag.
PairKernel = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@cache
def compiled_pair_kernel(device: str = "cpu") -> PairKernel | None:
    """Compile the fused kernel of `routing_drift` for rotary pairs, or return None where torch cannot compile.

    It takes some seconds for each dtype and pairing, once in a process. Dimensions without rotary do not need it.

    Args:
        device: type of device to try it on. Default "cpu".

    Returns:
        A function to pass as `kernel=`, or None if compiling fails (no C++ compiler, unsupported platform or Python).

    Source: derived.
    """
    ones = torch.ones(3, 5, 2, 16, device=device)
    return compiled_or_none(fused_pairs, (ones, torch.zeros_like(ones)), lambda found: float(found[0].sum()) == 480)


def fused_pairs(current: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`|d|²`, and the real and imaginary part of `zᴴd`, for the complex columns `d = current − start`, `z = start`."""
    now, z = current.float(), start.float()
    d = now - z
    (d_real, d_imag), (z_real, z_imag) = d.unbind(2), z.unbind(2)
    energy = (d_real * d_real + d_imag * d_imag).sum(-1)
    return energy, (z_real * d_real + z_imag * d_imag).sum(-1), (z_real * d_imag - z_imag * d_real).sum(-1)


def products(
    weight: Tensor,
    start: Tensor,
    bias: Tensor | None,
    start_bias: Tensor | None,
    geometry: AttentionLayer,
    role: str,
    kernel: PairKernel | None = None,
) -> Products:
    """The products of one side ("query" or "key"). Raises ValueError for tensors that do not fit the geometry."""
    heads = geometry.num_heads if role == "query" else geometry.num_key_value_heads
    found = _products_of(*_heads(weight, start, heads, geometry, role), geometry, kernel)
    if (bias is None) != (start_bias is None):
        now, before = ("none now", "one at the start") if bias is None else ("one now", "none at the start")
        raise ValueError(f"the {role} bias of layer {geometry.layer} must be given both times: {now}, {before}")
    if bias is not None and start_bias is not None:
        column = _heads(bias[..., None], start_bias[..., None], heads, geometry, f"{role} bias")
        found = [a + b for a, b in zip(found, _products_of(*column, geometry, None), strict=True)]
    group = geometry.num_heads // heads
    return Products(*(_shared(each, group) for each in found))


def _shared(tensor: Tensor, group: int) -> Tensor:
    """One entry for each query head of the group that shares a key head."""
    return tensor if group == 1 else tensor.repeat_interleave(group, 0, output_size=group * tensor.shape[0])


def _heads(current: Tensor, start: Tensor, heads: int, geometry: AttentionLayer, role: str) -> tuple[Tensor, Tensor]:
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


def _products_of(current: Tensor, start: Tensor, geometry: AttentionLayer, kernel: PairKernel | None) -> list[Tensor]:
    """The fields of `Products` for `[heads, head_dim, inputs]` tensors, one entry for each head."""
    first = geometry.rotary_offset if geometry.rotary_dim else 0
    last = first + geometry.rotary_dim

    def paired(tensor: Tensor) -> Tensor:
        heads, _, inputs = tensor.shape
        turned, pairs = tensor[:, first:last], geometry.rotary_dim // 2
        if geometry.rotary_pairing == "half":
            return turned.view(heads, 2, pairs, inputs).transpose(1, 2)
        return turned.view(heads, pairs, 2, inputs)

    def unpaired(tensor: Tensor) -> Tensor:
        sides = [side for side in (tensor[:, :first], tensor[:, last:]) if side.shape[1]]
        return (sides[0] if len(sides) == 1 else torch.cat(sides or [tensor[:, :0]], dim=1))[:, None]

    gram, cross = _inner(unpaired(current), unpaired(start))
    return [*_pair_products(paired(current), paired(start), kernel), gram[:, 0], cross[:, 0]]


def _pair_products(current: Tensor, start: Tensor, kernel: PairKernel | None) -> tuple[Tensor, Tensor, Tensor]:
    if kernel is not None and current.numel() and current.dtype == start.dtype != torch.float64:
        return kernel(current, start)
    square, overlap = _inner(current, start)
    return (
        square[..., 0, 0] + square[..., 1, 1],
        overlap[..., 0, 0] + overlap[..., 1, 1],
        overlap[..., 1, 0] - overlap[..., 0, 1],
    )


def _inner(current: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`d dᵀ` and `d zᵀ` over the last dimension of `[heads, blocks, rows, inputs]`: d = current − start, z = start.

    Works on a cache-sized part at a time. Returns two `[heads, blocks, rows, rows]` tensors.
    """
    heads, blocks, rows, inputs = current.shape
    dtype = compute_dtype(current, start)
    if not current.numel():
        nothing = torch.zeros(heads, blocks, rows, rows, dtype=dtype, device=current.device)
        return nothing, nothing
    chunk = _CHUNK_CPU if current.is_cpu else _CHUNK_ACCELERATOR
    num_blocks = min(blocks, max(1, chunk // (rows * inputs)))
    num_heads = min(heads, max(1, chunk // (blocks * rows * inputs))) if num_blocks == blocks else 1
    part_numel = num_heads * num_blocks * rows * inputs
    d_buffer, z_buffer = torch.empty(2, part_numel, dtype=dtype, device=current.device)
    squares, crosses, d = [], [], d_buffer
    with full_precision(current.device):
        for now, z in zip(_parts(current, num_heads, num_blocks), _parts(start, num_heads, num_blocks), strict=True):
            if d.shape != now.shape:
                d, wide_z = _like(now, d_buffer), _like(now, z_buffer)
                d_columns = d.mT
            if z.dtype != dtype:
                z = wide_z.copy_(z)
            if now.dtype == dtype:
                torch.sub(now, z, out=d)
            else:
                d.copy_(now).sub_(z)
            squares.append(torch.bmm(d, d_columns))
            crosses.append(torch.bmm(d, z.mT))
    shape = heads, blocks, rows, rows
    return torch.cat(squares).view(shape), torch.cat(crosses).view(shape)


def _parts(tensor: Tensor, num_heads: int, num_blocks: int) -> Sequence[Tensor]:
    """Cut into runs of heads, or into single heads and those into runs of blocks; each part `[n, rows, inputs]`."""
    if num_heads > 1:
        return [part.flatten(0, 1) for part in tensor.split(num_heads)]
    by_head = tensor.unbind()
    return by_head if num_blocks >= tensor.shape[1] else [part for head in by_head for part in head.split(num_blocks)]


def _like(part: Tensor, buffer: Tensor) -> Tensor:
    """The start of a flat buffer in the shape of a part, with the rows of a block as far apart as in the part."""
    blocks, rows, inputs = part.shape
    flat = buffer[: part.numel()]
    if part.stride(0) < part.stride(1):
        return flat.view(rows, blocks, inputs).transpose(0, 1)
    return flat.view(blocks, rows, inputs)
