"""Write a safetensors file piece by piece, without torch and without holding its tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from routeguard.storage.durable import Flusher
from routeguard.storage.header import DTYPE_NAMES

_FORMAT_NAMES = {torch_name: name for name, torch_name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write: its bytes come in chunks, in row-major order."""

    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int
    chunks: Iterable[bytes]


def write_safetensors(path: Path, tensors: Sequence[Outgoing], metadata: Mapping[str, str]) -> None:
    """Write the tensors in the order given. Raises ValueError if one yields more or fewer bytes than it promised."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        dtype = _FORMAT_NAMES[tensor.dtype]
        end = position + tensor.num_bytes
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as stream, Flusher() as flusher:
        stream.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors:
            written = sum(stream.write(chunk) for chunk in tensor.chunks)
            flusher.early(path)
            if written != tensor.num_bytes:
                raise ValueError(f"{tensor.name} gave {written} bytes, promised {tensor.num_bytes}")
