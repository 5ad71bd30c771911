"""Rows on disk as torch tensors, for what needs arithmetic beyond a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.routes.collection import count_rows
from routeguard.storage.row_bytes import Slice, read_rows


def read_tensor(part: Slice) -> Tensor:
    """The rows, concatenated along `dim`, in their own dtype, on the CPU."""
    shape = list(part.tensor.shape)
    if part.rows is not None:
        shape[part.dim] = count_rows(part.rows)
    data = read_rows(part.tensor, part.rows, part.dim)
    return torch.frombuffer(data, dtype=getattr(torch, part.tensor.dtype)).reshape(shape)


def tensor_bytes(values: Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
