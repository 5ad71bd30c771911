"""Checkpoint folders for tests: written by transformers, read back without any of the code under test."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from routeguard.routes.collection import Routes
from tests.tuned import start_and_tuned

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}


def write_pair(
    name: str, folder: Path, *, base_shards: str = "5GB", tuned_shards: str = "5GB", **options: Any
) -> tuple[nn.Module, nn.Module]:
    """`folder/base` and `folder/tuned` of a zoo case; returns the two models."""
    start, tuned = start_and_tuned(name, **options)
    start.save_pretrained(folder / "base", max_shard_size=base_shards)
    tuned.save_pretrained(folder / "tuned", max_shard_size=tuned_shards)
    return start, tuned


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """(where the data begins, the header as JSON), by the format's definition."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def routing_mask(file: Path, routes: Routes) -> npt.NDArray[np.bool_]:
    """For every byte of a safetensors file whether it is routing, from the routes and the file's own header."""
    start, header = read_header(file)
    mask = np.zeros(file.stat().st_size, dtype=bool)
    for route in routes:
        if route.parameter not in header:
            continue
        entry = header[route.parameter]
        held = np.zeros(entry["shape"], dtype=bool)
        for begin, end in route.rows or ((0, route.shape[route.dim]),):
            held[(slice(None),) * route.dim + (slice(begin, end),)] = True
        begin, end = entry["data_offsets"]
        mask[start + begin : start + end] |= np.repeat(held.reshape(-1), ITEM_BYTES[entry["dtype"]])
    return mask


def file_bytes(file: Path) -> npt.NDArray[np.uint8]:
    return np.frombuffer(file.read_bytes(), np.uint8)


def snapshot(folder: Path) -> dict[str, str]:
    """Relative name to sha256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_file(
    path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None
) -> None:
    """A safetensors file by the format's definition: name to (dtype, shape, bytes)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
