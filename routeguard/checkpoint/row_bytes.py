"""Read some rows of a tensor straight from a safetensors file, without torch and without reading the rest."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from routeguard.routes.collection import Rows, dtype_bytes, merge_rows
from routeguard.routes.names import canonical_name
from routeguard.routes.on_disk import DTYPE_NAMES, read_header, safetensors_files

CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk: file, shape, dtype (torch's name), and the byte offset of its first element."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Canonical name to `StoredTensor` of every tensor in some safetensors files; ValueError for a malformed one."""
    return {canonical_name(tensor.name): tensor for file in files for tensor in _tensors_of(file)}


def stored_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """`stored_tensors` of a checkpoint folder, sharded or not."""
    return stored_tensors(safetensors_files(folder))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter and no whole model."""
    whole = ("model.safetensors", "model.safetensors.index.json")
    return (folder / "adapter_config.json").is_file() and not any((folder / name).is_file() for name in whole)


def adapter_file(folder: Path) -> Path:
    """The weights of a PEFT adapter folder. Raises ValueError if they are absent or pickled."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ValueError(f"{folder} holds adapter_config.json but no adapter_model.safetensors")
    return file


def read_metadata(file: Path) -> dict[str, str]:
    """The free-form metadata of a safetensors header, empty if there is none; ValueError for a malformed file."""
    read_header(file)
    with file.open("rb") as stream:
        metadata = json.loads(stream.read(_header_bytes(file, stream.read(8)))).get("__metadata__")
    return {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def row_chunks(
    tensor: StoredTensor, rows: Rows | None, dim: int, *, chunk_elements: int | None = None
) -> Iterator[bytes]:
    """The bytes of the rows, concatenated along `dim`, in row-major order, in chunks of equally many elements.

    Args:
        tensor: where to read.
        rows: `(start, stop)` ranges along `dim`; None for all.
        dim: 0 reads contiguous ranges; other dimensions are strided.
        chunk_elements: elements of every chunk but the last. Default: what fits 4 MiB.

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


def _tensors_of(file: Path) -> Iterator[StoredTensor]:
    entries: Mapping[str, dict[str, Any]] = read_header(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        data_start = 8 + _header_bytes(file, stream.read(8))
    for name, entry in entries.items():
        dtype = DTYPE_NAMES.get(entry["dtype"])
        offsets = entry.get("data_offsets")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(n, int) for n in offsets)):
            raise ValueError(f"{file} has a malformed entry for {name!r}")
        begin, end = offsets
        expected = None if dtype is None else prod(entry["shape"]) * dtype_bytes(dtype)
        if begin < 0 or data_start + end > size or (expected is not None and end - begin != expected):
            raise ValueError(
                f"{file}: {name!r} claims bytes {begin} to {end}, which does not fit its shape {entry['shape']} "
                f"({entry['dtype']}) in a file of {size} bytes; the file is cut short or damaged"
            )
        yield StoredTensor(name, file, tuple(entry["shape"]), dtype or entry["dtype"].lower(), data_start + begin)


def _header_bytes(file: Path, prefix: bytes) -> int:
    if len(prefix) != 8:
        raise ValueError(f"{file} is not a safetensors file")
    length: int = struct.unpack("<Q", prefix)[0]
    return length


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
