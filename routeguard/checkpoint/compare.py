"""Compare rows of two stored tensors chunk by chunk, in plain Python: bytes first, values where the dtypes differ."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import reduce

from routeguard.checkpoint.row_bytes import CHUNK_BYTES, StoredTensor, row_chunks
from routeguard.routes.collection import Rows

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_WITHOUT_SIGN = bytes(byte & 0x7F for byte in range(256))


@dataclass(frozen=True)
class Slice:
    """Some rows of a stored tensor."""

    tensor: StoredTensor
    rows: Rows | None
    dim: int

    @property
    def num_elements(self) -> int:
        total = 1
        for axis, size in enumerate(self.tensor.shape):
            total *= size if axis != self.dim or self.rows is None else sum(b - a for a, b in self.rows)
        return total


def why_not_comparable(one: Slice, other: Slice) -> str:
    """Why two slices cannot be equal whatever their bytes, or ""."""
    kinds = (one.tensor.dtype, other.tensor.dtype)
    if kinds[0] != kinds[1] and not set(kinds) <= set(_FLOATS):
        return f"stored as {kinds[0]} against {kinds[1]}, which do not convert without loss"
    if one.num_elements != other.num_elements:
        return f"{one.num_elements} entries against {other.num_elements}"
    return ""


def num_differing(one: Slice, other: Slice) -> int:
    """How many entries differ, read 4 MiB at a time; unequal dtypes are compared in a float type that holds both."""
    kinds = {one.tensor.dtype, other.tensor.dtype}
    common = None if len(kinds) == 1 else "float64" if "float64" in kinds else "float32"
    item = max(one.tensor.item_bytes, other.tensor.item_bytes)
    elements = CHUNK_BYTES // item
    pairs = zip(
        row_chunks(one.tensor, one.rows, one.dim, chunk_elements=elements),
        row_chunks(other.tensor, other.rows, other.dim, chunk_elements=elements),
        strict=True,
    )
    differing = 0
    for a, b in pairs:
        if common is not None:
            a, b = _widened(a, one.tensor.dtype, common), _widened(b, other.tensor.dtype, common)
        if a != b:
            width = one.tensor.item_bytes if common is None else (8 if common == "float64" else 4)
            differing += _num_set(
                (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little"), width
            )
    return differing


def num_nonzero(part: Slice) -> int:
    """How many entries are not zero (either sign of zero is zero)."""
    width = part.tensor.item_bytes
    count = 0
    for chunk in row_chunks(part.tensor, part.rows, part.dim):
        data = bytearray(chunk)
        data[width - 1 :: width] = data[width - 1 :: width].translate(_WITHOUT_SIGN)
        count += _num_set(bytes(data), width)
    return count


def _num_set(data: bytes, width: int) -> int:
    """Entries of `width` bytes that have any bit set."""
    lanes = [int.from_bytes(data[lane::width], "little") for lane in range(width)]
    num_entries = len(data) // width
    return num_entries - reduce(int.__or__, lanes).to_bytes(num_entries, "little").count(0)


def _widened(data: bytes, dtype: str, target: str) -> bytes:
    """The same values in float32 or float64; both hold every narrower float exactly."""
    if dtype == target:
        return data
    if dtype == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return _widened(bytes(wide), "float32", target)
    count = len(data) // (2 if dtype == "float16" else 4)
    values = struct.unpack(f"<{count}{'e' if dtype == 'float16' else 'f'}", data)
    return struct.pack(f"<{count}{'f' if target == 'float32' else 'd'}", *values)
