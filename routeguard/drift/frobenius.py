"""How far a weight moved: the Frobenius distance to its start, subtracted first and never expanded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from routeguard.routes.collection import Rows

# Scalars held at once. On the CPU 2 MiB of float32, so that the difference is summed while it is still in the cache;
# an accelerator wants few large launches instead.
_CHUNK_CPU = 1 << 19
_CHUNK_ACCELERATOR = 1 << 22

# Two tensors [n, KERNEL_COLUMNS] of one dtype to the 0-d sum of squares of their difference.
Kernel = Callable[[Tensor, Tensor], Tensor]
KERNEL_COLUMNS = 1024
Found = TypeVar("Found")


@torch.no_grad()
def squared_distance(
    weight: Tensor, start: Tensor, *, rows: Rows | None = None, dim: int = 0, kernel: Kernel | None = None
) -> Tensor:
    """Squared Frobenius distance `‖W − W₀‖²`, added up on the device without a host synchronisation.

    The difference is taken first, in float32 (in float64 when both tensors are float64), and then squared.
    `‖W‖² − 2⟨W, W₀⟩ + ‖W₀‖²` is the same number on paper and loses all digits for small drifts.

    Args:
        weight: the current weight, any shape and floating dtype.
        start: the weight at the start. With `rows` it holds those rows only, one range after the other along `dim`;
            without, it has the shape of `weight`. Its dtype may differ from that of `weight`.
        rows: `(start, stop)` ranges along `dim` to compare, or None for the whole weight.
        dim: the dimension that `rows` index. Default 0.
        kernel: what `compiled_kernel()` returned, to read both tensors once in a fused loop; None for plain torch
            operations. Blocks that are not contiguous or no multiple of 1024 scalars go the plain way all the same.

    Returns:
        A 0-d float32 tensor on the device of `weight`. Squared distances of shards or row ranges may be added.

    Raises:
        ValueError: shapes, devices or ranges that do not fit together, or a dtype that is not floating point.

    Source: derived.
    """
    dtype = compute_dtype(weight, start)
    blocks = _blocks(weight, start, rows, dim)
    sums = []
    if kernel is not None and weight.dtype == start.dtype and weight.dtype != torch.float64:
        fused = [block for block in blocks if _fits_kernel(*block)]
        sums = [kernel(now.view(-1, KERNEL_COLUMNS), old.view(-1, KERNEL_COLUMNS)) for now, old in fused]
        blocks = [block for block in blocks if not _fits_kernel(*block)]
    pieces = [piece for block in blocks for piece in _pieces(*block)]
    buffer = torch.empty(max((now.numel() for now, _ in pieces), default=0), dtype=dtype, device=weight.device)
    difference = buffer
    for now, old in pieces:
        if difference.shape != now.shape:
            difference = buffer[: now.numel()].view(now.shape)
        if now.dtype == old.dtype == dtype:
            torch.sub(now, old, out=difference)
        else:  # torch.sub(out=float32) of two bfloat16 tensors would round to bfloat16 on the way
            difference.copy_(now).sub_(old)
        sums.append(_sum_of_squares(difference))
    return _total(sums, weight.device)


@cache
def compiled_kernel(device: str = "cpu") -> Kernel | None:
    """Compile the fused kernel of `squared_distance`, or return None where torch cannot compile.

    It takes some seconds for each dtype, once in a process, and reads each tensor once: worth it where drift is
    measured at every step of a long run. It is tried on a small tensor first, so a missing compiler shows at once.

    Args:
        device: type of device to try it on. Default "cpu".

    Returns:
        A function to pass as `kernel=`, or None if compiling fails (no C++ compiler, unsupported platform or Python).

    Source: derived.
    """
    ones = torch.ones(3, KERNEL_COLUMNS, device=device)
    return compiled_or_none(
        _fused_sum_of_squares, (ones, torch.zeros_like(ones)), lambda found: float(found) == ones.numel()
    )


@torch.no_grad()
def squared_norm(tensor: Tensor) -> Tensor:
    """Squared Frobenius norm `‖W₀‖²`, to compute once for a start.

    Args:
        tensor: any shape and floating dtype.

    Returns:
        A 0-d float32 tensor on the device of `tensor`.

    Raises:
        ValueError: the dtype is not floating point.

    Source: derived.
    """
    dtype = compute_dtype(tensor)
    sums = [_sum_of_squares(piece.to(dtype)) for piece, _ in _pieces(tensor, tensor)]
    return _total(sums, tensor.device)


def relative(distance: Tensor, norm: Tensor) -> Tensor:
    """`distance / norm`, element by element.

    A start of all zeros (a fresh bias) has no scale to be relative to: where the norm is 0 it is the plain distance, 0
    as long as nothing moves and never a division by zero.
    """
    return distance / torch.where(norm > 0, norm, torch.ones_like(norm))


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if every tensor is float64, else float32. Raises ValueError for a dtype that is not floating point."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(
                f"drift needs floating-point weights, found {tensor.dtype} of shape {tuple(tensor.shape)}; "
                "dequantise the weight first"
            )
    return torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def compiled_or_none(
    function: Callable[..., Found], example: tuple[Tensor, ...], correct: Callable[[Found], bool]
) -> Callable[..., Found] | None:
    """Compile for any size, try it on the example, and return None if that fails or the result is not correct."""
    try:
        compiled = torch.compile(function, dynamic=True)
        with torch.no_grad():
            return compiled if correct(compiled(*example)) else None
    except Exception:  # whatever the compiler stack raises, plain operations remain
        return None


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Keeps an autocast region around the caller from rounding matrix products to 16 bits."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def row_blocks(tensor: Tensor, rows: Rows | None, dim: int = 0) -> list[Tensor]:
    """Views of the row ranges of a tensor. Raises ValueError for a range or dimension outside of it."""
    if rows is None:
        return [tensor]
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(tensor.shape)}")
    size = tensor.shape[dim]
    for first, stop in rows:
        if not 0 <= first <= stop <= size:
            raise ValueError(f"rows ({first}, {stop}) do not lie within the {size} rows of dimension {dim}")
    return [tensor.narrow(dim, first, stop - first) for first, stop in rows]


def _blocks(weight: Tensor, start: Tensor, rows: Rows | None, dim: int) -> list[tuple[Tensor, Tensor]]:
    """The row ranges of the weight beside their part of the start."""
    if weight.device != start.device:
        raise ValueError(f"the weight is on {weight.device} and its start on {start.device}; move the start there")
    current = row_blocks(weight, rows, dim)
    sizes = [block.shape[dim] for block in current] if rows is not None else []
    expected = list(weight.shape)
    if rows is not None:
        expected[dim] = sum(sizes)
    if list(start.shape) != expected:
        asked = "all rows" if rows is None else f"rows {rows} of dimension {dim}"
        raise ValueError(
            f"the start has shape {tuple(start.shape)}, but {asked} of a weight of shape {tuple(weight.shape)} "
            f"have shape {tuple(expected)}; pass the start of the same parameter and the same rows"
        )
    return list(zip(current, [start] if rows is None else start.split(sizes, dim), strict=True))


def _pieces(weight: Tensor, start: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut two tensors of one shape into cache-sized pairs of views: flat where both are contiguous, else by rows."""
    if not weight.numel():
        return
    size = _CHUNK_CPU if weight.device.type == "cpu" else _CHUNK_ACCELERATOR
    if weight.is_contiguous() and start.is_contiguous():
        weight, start = weight.view(-1), start.view(-1)
    else:
        size = max(1, size * weight.shape[0] // weight.numel())
    yield from zip(weight.split(size), start.split(size), strict=True)


def _fits_kernel(weight: Tensor, start: Tensor) -> bool:
    return weight.is_contiguous() and start.is_contiguous() and weight.numel() > 0 == weight.numel() % KERNEL_COLUMNS


def _fused_sum_of_squares(weight: Tensor, start: Tensor) -> Tensor:
    return (weight.float() - start.float()).square().sum(-1).sum()


def _total(sums: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(sums).sum().float() if sums else torch.zeros((), dtype=torch.float32, device=device)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    if tensor.is_cpu:
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.square()
