"""Read and write some rows of a tensor in a safetensors file, without torch and without touching the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import BinaryIO

from routeguard.routes.collection import Rows, merge_rows
from routeguard.storage.header import StoredTensor

CHUNK_BYTES = 2**20


def row_chunks(
    tensor: StoredTensor, rows: Rows | None, dim: int, *, chunk_elements: int | None = None
) -> Iterator[bytes]:
    """The bytes of the rows, concatenated along `dim`, in row-major order, in chunks of equally many elements.

    Args:
        tensor: where to read.
        rows: `(start, stop)` ranges along `dim`; None for all.
        dim: 0 reads contiguous ranges; other dimensions are strided.
        chunk_elements: elements of every chunk but the last. Default: what fits 1 MiB.

    Raises ValueError if a range lies outside the tensor or the file ends too early.
    """
    size = (chunk_elements or CHUNK_BYTES // tensor.item_bytes) * tensor.item_bytes
    pending = bytearray()
    with tensor.file.open("rb") as stream:
        for offset, length in _segments(tensor, rows, dim):
            stream.seek(offset)
            while length:
                piece = stream.read(min(length, size - len(pending)))
                if not piece:
                    raise ValueError(f"{tensor.file} ends inside {tensor.name}; the file is cut short")
                length -= len(piece)
                if len(piece) == size:  # nothing pending: pass it on without a copy
                    yield piece
                    continue
                pending += piece
                if len(pending) == size:
                    yield bytes(pending)
                    pending.clear()
    if pending:
        yield bytes(pending)


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
    return None if tuple(located) == ((0, sum(b - a for a, b in have)),) else tuple(located)


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
