"""Floating-point bytes as numpy arrays and back, with bfloat16, which numpy lacks. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview
Floats = npt.NDArray[Any]


def float_type(dtype: str) -> type:
    """What `to_floats` gives for a dtype."""
    return np.float64 if dtype == "float64" else np.float32


def to_floats(data: Buffer, dtype: str, out: Floats | None = None) -> Floats:
    """The values as float32 (float64 for float64): exact for every narrower type.

    Args:
        out: room for them, at least as many; the result is then its first part. Default: new, or the data itself.
    """
    if dtype == "bfloat16":
        stored = np.frombuffer(data, np.uint16)
        values = np.empty(len(stored), np.float32) if out is None else out[: len(stored)]
        bits = values.view(np.uint32)
        bits[:] = stored
        bits <<= 16
        return values
    stored = np.frombuffer(data, np.dtype(dtype))
    if out is None:
        return stored.astype(np.float32) if dtype == "float16" else stored
    out[: len(stored)] = stored
    return out[: len(stored)]


def to_bytes(values: Floats, dtype: str) -> bytes:
    """Finite values in a dtype, rounded to nearest even as torch does (float64 goes through float32)."""
    if dtype == "float64":
        return values.astype(np.float64).tobytes()
    single = values.astype(np.float32)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # beyond float16 is infinite, which the caller looks for
            return single.astype(np.dtype(dtype)).tobytes()
    bits = single.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def to_bytes_at_random(values: Floats, dtype: str, random: np.random.Generator) -> bytes:
    """Finite values in a dtype; in 16 bits each becomes one of its two neighbours, so that the mean is the value.

    The numpy twin of `restoration.rounding.round_at_random`; wider types are rounded to nearest.
    """
    near_bytes = to_bytes(values, dtype)
    if dtype not in ("bfloat16", "float16"):
        return near_bytes
    near = to_floats(near_bytes, dtype)
    outward = np.sign(np.abs(values) - np.abs(near)).astype(np.int16)
    other_bits = np.frombuffer(near_bytes, np.int16) + outward
    other = to_floats(other_bits.tobytes(), dtype)
    with np.errstate(invalid="ignore"):
        taken = random.random(len(values), np.float32) * np.abs(other - near) < np.abs(values - near)
    taken &= np.isfinite(other)
    return np.where(taken, other_bits, np.frombuffer(near_bytes, np.int16)).tobytes()


def converted(data: bytes, source: str, target: str) -> bytes:
    """The same values in another dtype; the bytes themselves if it is the same."""
    return data if source == target else to_bytes(to_floats(data, source), target)


def is_exact(source: str, target: str) -> bool:
    """Whether every value of one float type has the same value in another."""
    return source == target or target == "float64" or (target == "float32" and source != "float64")
