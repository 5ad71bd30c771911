"""Compare rows of two stored tensors chunk by chunk: bytes first, values where the dtypes differ. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from routeguard.storage.floats import Buffer, converted, to_floats
from routeguard.storage.header import FLOATS
from routeguard.storage.row_bytes import CHUNK_BYTES, Slice


def why_not_comparable(one: Slice, other: Slice) -> str:
    """Why two slices cannot be equal whatever their bytes, or ""."""
    kinds = (one.tensor.dtype, other.tensor.dtype)
    if kinds[0] != kinds[1] and not set(kinds) <= set(FLOATS):
        return f"stored as {kinds[0]} against {kinds[1]}, which do not convert without loss"
    if one.num_elements != other.num_elements:
        return f"{one.num_elements} entries against {other.num_elements}"
    return ""


def chunk_pairs(one: Slice, other: Slice) -> Iterator[tuple[memoryview, memoryview]]:
    """The bytes of two slices with equally many entries, side by side, at most 512 KiB of each at a time.

    Each pair is overwritten by the next.
    """
    elements = elements_of_pairs(one, other)
    buffers = [bytearray(elements * part.tensor.item_bytes) for part in (one, other)]
    return zip(one.read_through(buffers[0]), other.read_through(buffers[1]), strict=True)


def elements_of_pairs(one: Slice, other: Slice) -> int:
    """The most entries in a pair of `chunk_pairs`."""
    return CHUNK_BYTES // max(one.tensor.item_bytes, other.tensor.item_bytes)


def num_differing(one: Slice, other: Slice, *, through: str = "") -> int:
    """How many entries of `one` differ from `other`: in their bytes, or from its values rounded to `one`'s dtype.

    With `through`, a float dtype, the values of `other` are rounded to that first.
    """
    kind, start_kind = one.tensor.dtype, other.tensor.dtype
    through = through or start_kind
    same_bytes = kind == start_kind == through
    differing = 0
    for a, b in chunk_pairs(one, other):
        if same_bytes:
            differing += num_unequal(a, b, one.tensor.item_bytes)
        else:
            rounded = to_floats(converted(converted(bytes(b), start_kind, through), through, kind), kind)
            differing += int(np.count_nonzero(to_floats(a, kind) != rounded))
    return differing


def rounding_that_explains(one: Slice, other: Slice) -> str:
    """The 16-bit dtype, neither's own, through which the values of `other` become those of `one`; "" if none does."""
    kinds = (one.tensor.dtype, other.tensor.dtype)
    if not set(kinds) <= set(FLOATS):
        return ""
    others = (kind for kind in ("bfloat16", "float16") if kind not in kinds)
    return next((kind for kind in others if not num_differing(one, other, through=kind)), "")


def num_unequal(a: Buffer, b: Buffer, item_bytes: int) -> int:
    """How many entries of `item_bytes` bytes differ between two equally long buffers."""
    word = np.dtype(f"u{item_bytes}")
    return int(np.count_nonzero(np.frombuffer(a, word) != np.frombuffer(b, word)))


def num_nonzero(part: Slice) -> int:
    """How many entries are not zero (either sign of zero is zero)."""
    word = np.dtype(f"u{part.tensor.item_bytes}")
    without_sign = word.type((1 << (8 * part.tensor.item_bytes - 1)) - 1)
    return sum(int(np.count_nonzero(np.frombuffer(chunk, word) & without_sign)) for chunk in part.chunks())
