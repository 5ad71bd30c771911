"""Read and write some rows of a tensor in a safetensors file, without torch and without touching the rest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from routeguard.routes.collection import Rows, count_rows, merge_rows
from routeguard.storage.header import StoredTensor

CHUNK_BYTES = 2**19


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
            total *= size if axis != self.dim or self.rows is None else count_rows(self.rows)
        return total

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.tensor.item_bytes

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the rows, as `row_chunks` gives them."""
        return row_chunks(self.tensor, self.rows, self.dim)

    def read_through(self, buffer: bytearray) -> Iterator[memoryview]:
        """The bytes of the rows, a buffer full at a time, as `read_through` gives them."""
        return read_through(self.tensor, self.rows, self.dim, buffer)


def row_chunks(
    tensor: StoredTensor, rows: Rows | None, dim: int, *, chunk_elements: int | None = None
) -> Iterator[bytes]:
    """The bytes of the rows, concatenated along `dim`, in row-major order, in chunks of equally many elements.

    Args:
        tensor: where to read.
        rows: `(start, stop)` ranges along `dim`; None for all.
        dim: 0 reads contiguous ranges; other dimensions are strided.
        chunk_elements: elements of every chunk but the last. Default: what fits 512 KiB.

    Raises ValueError if a range lies outside the tensor or the file ends too early.
    """
    size = (chunk_elements or CHUNK_BYTES // tensor.item_bytes) * tensor.item_bytes
    return map(bytes, read_through(tensor, rows, dim, bytearray(size)))


def read_through(tensor: StoredTensor, rows: Rows | None, dim: int, buffer: bytearray) -> Iterator[memoryview]:
    """What `row_chunks` gives, always in the same buffer: each part is overwritten by the next."""
    view, used = memoryview(buffer), 0
    with tensor.file.open("rb") as stream:
        for offset, length in _segments(tensor, rows, dim):
            stream.seek(offset)
            while length:
                count = stream.readinto(view[used : used + length])
                if not count:
                    raise ValueError(f"{tensor.file} ends inside {tensor.name}; the file is cut short")
                length -= count
                used += count
                if used == len(view):
                    yield view
                    used = 0
    if used:
        yield view[:used]


def prefetch_rows(parts: Iterable[Slice]) -> None:
    """Ask the system to read rows ahead, all of them at once; a hint, which changes no answer."""
    if not hasattr(os, "posix_fadvise"):
        return
    by_file: dict[Path, list[tuple[int, int]]] = {}
    for part in parts:
        tensor = part.tensor
        whole = part.rows is None or (part.dim != 0 and len(tensor.shape) > 1)  # strided rows touch every page
        spans = [(tensor.offset, tensor.num_bytes)] if whole else list(_segments(tensor, part.rows, part.dim))
        by_file.setdefault(tensor.file, []).extend(spans)
    for file, spans in by_file.items():
        with file.open("rb") as stream:
            for offset, length in spans:
                for at in range(offset, offset + length, CHUNK_BYTES):  # a longer hint is cut off by some kernels
                    size = min(CHUNK_BYTES, offset + length - at)
                    os.posix_fadvise(stream.fileno(), at, size, os.POSIX_FADV_WILLNEED)


def read_rows(tensor: StoredTensor, rows: Rows | None, dim: int) -> bytearray:
    """The bytes of the rows, concatenated along `dim`, in row-major order."""
    data = bytearray()
    for chunk in row_chunks(tensor, rows, dim):
        data += chunk
    return data


def write_rows(stream: BinaryIO, tensor: StoredTensor, rows: Rows | None, dim: int, data: Iterable[bytes]) -> int:
    """Write chunks, as `row_chunks` gives them, over the rows of a tensor in an open file. Returns the bytes written.

    Raises ValueError when there are more or fewer bytes than the rows take; what fits is then already written.
    """
    chunks = iter(data)
    chunk, used, written = b"", 0, 0
    for offset, length in _segments(tensor, rows, dim):
        stream.seek(offset)
        while length:
            if used == len(chunk):
                chunk, used = next(chunks, b""), 0
                if not chunk:
                    raise ValueError(f"the values for {tensor.name} end after {written} bytes")
            taken = min(length, len(chunk) - used)
            stream.write(memoryview(chunk)[used : used + taken])
            used += taken
            length -= taken
            written += taken
    if used < len(chunk) or next(chunks, b""):
        raise ValueError(f"there are more values for {tensor.name} than its rows take ({written} bytes)")
    return written


def locate_rows(have: Rows | None, want: Rows | None, *, total: int, what: str) -> Rows | None:
    """Where the rows `want` lie in a tensor that keeps only the rows `have`, concatenated in order.

    Args:
        have, want: `(start, stop)` ranges in the whole tensor; None is all `total` rows.
        what: the tensor's name, for the message.

    Raises ValueError when some wanted rows are not kept.
    """
    if have is None:
        return want
    ranges = ((0, total),) if want is None else want
    located = []
    for start, stop in ranges:
        offset = 0
        for kept_start, kept_stop in have:
            if kept_start <= start and stop <= kept_stop:
                located.append((offset + start - kept_start, offset + stop - kept_start))
                break
            offset += kept_stop - kept_start
        else:
            raise ValueError(
                f"rows [{start}, {stop}) of {what} are wanted, but only rows {list(merge_rows(have))} are kept"
            )
    return None if tuple(located) == ((0, count_rows(have)),) else tuple(located)


def _segments(tensor: StoredTensor, rows: Rows | None, dim: int) -> Iterator[tuple[int, int]]:
    """(absolute offset, bytes) of every contiguous run, in row-major order."""
    shape = tensor.shape
    if rows is None:
        yield tensor.offset, prod(shape) * tensor.item_bytes
        return
    outside = [r for r in rows if not 0 <= r[0] <= r[1] <= shape[dim]]
    if outside:
        raise ValueError(
            f"{tensor.name} in {tensor.file} has {shape[dim]} rows along dimension {dim}; asked for {outside}"
        )
    inner = prod(shape[dim + 1 :]) * tensor.item_bytes
    for outer in range(prod(shape[:dim])):
        for start, stop in rows:
            yield tensor.offset + (outer * shape[dim] + start) * inner, (stop - start) * inner
