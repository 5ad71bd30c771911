"""What the tests of the drift formulas share: changes of a given relative size, and comparison in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.drift.frobenius import relative, squared_distance, squared_norm

CHANGES = [1e-2, 1e-4, 1e-5, 1e-6, 1e-7]


def changed(tensor: Tensor, size: float) -> Tensor:
    """The tensor with a relative change of about `size`, rounded to its dtype."""
    return (tensor.double() * (1 + size * torch.randn(tensor.shape, dtype=torch.float64))).to(tensor.dtype)


def close(measured: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool(((measured.double() - expected).abs() <= tolerance * expected.abs()).all())


def relative_drift(weight: Tensor, start: Tensor) -> Tensor:
    """`‖W − W₀‖ / ‖W₀‖`, put together from the functions under test."""
    return relative(squared_distance(weight, start).sqrt(), squared_norm(start).sqrt())
