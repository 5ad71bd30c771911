"""Rounding to 16 bits at random, so that a small step is kept on average instead of being lost in every entry."""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)


def round_at_random(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values in a narrower type: each becomes one of its two neighbours there, the nearer one more likely.

    The chance is such that the mean is the value itself (stochastic rounding). What the type can hold stays exact;
    wider types are cast.

    Args:
        values: finite, float32 or wider, any shape, on any device.
        dtype: the type of the result.
        generator: source of randomness, on the CPU, so that the result does not depend on the device.
    """
    near = values.to(dtype)
    if dtype not in NARROW:
        return near
    gap = values - near.to(values.dtype)
    outward = torch.sign(values.abs() - near.to(values.dtype).abs()).to(torch.int16)
    other = (near.view(torch.int16) + outward).view(dtype)  # in both types the next larger magnitude has the next bits
    width = (other.to(values.dtype) - near.to(values.dtype)).abs()
    draw = torch.rand(values.shape, generator=generator).to(values.device)
    return torch.where((draw * width < gap.abs()) & other.isfinite(), other, near)
