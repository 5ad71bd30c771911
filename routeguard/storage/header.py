"""Read the header of a safetensors file: what lies where. Written for files that nobody vouches for.

The header is parsed entry by entry, so that memory is bounded by its length, and everything that the format promises
is checked before a single offset is used: sizes that fit shapes, and tensors that fill the file without gap or overlap.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from routeguard.routes.block import TensorInfo
from routeguard.routes.collection import dtype_bytes

MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_DIMENSIONS = 64
_MAX_ENTRY_CHARACTERS = 4096
_DTYPE = re.compile(r"[A-Z0-9_]{1,16}")  # names that came after this version are read, not interpreted
_SPACE = r"[ \t\n\r]*"  # JSON's, which is less than a regular expression's
_QUOTE = re.compile(rf'{_SPACE}"')
_COLON = re.compile(rf"{_SPACE}:{_SPACE}")
_ENTRY = re.compile(rf"\{{[^{{}}]{{0,{_MAX_ENTRY_CHARACTERS}}}\}}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MORE = re.compile(rf"{_SPACE}([,}}])")
_OPENING = re.compile(rf"{_SPACE}\{{")
_CLOSING = re.compile(rf"{_SPACE}\}}")


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """A tensor on disk: name, shape and dtype (torch's name), its file, and where its bytes are in it.

    `dtype` is the format's name in lower case where torch has none that routeguard reads.
    """

    file: Path = Path()
    offset: int = 0
    num_bytes: int = 0

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself; `data_start` is where the tensors' bytes begin."""

    file: Path
    data_start: int
    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Read and check a header, without torch and in memory proportional to it. ValueError for a malformed file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if prefix == b"version ":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{file} is not a safetensors file: its header claims {length} bytes, the file has {size}")
        try:
            text = stream.read(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _malformed(file, str(error)) from None
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] | None = None
    for name, value in _members(file, text):
        if isinstance(value, dict):
            if metadata is not None:
                raise _malformed(file, "__metadata__ appears twice")
            metadata = value
            continue
        if name in tensors:
            raise _malformed(file, f"{name!r} appears twice")
        if _CONTROL.search(name) or (not name.isascii() and not _encodable(name)):
            raise _malformed(file, f"{name[:200]!r} has characters that no tensor name has")
        tensors[name] = _tensor(file, name, value, data_start=8 + length)
    _refuse_gaps(file, tensors, data_start=8 + length, size=size)
    return Header(file, 8 + length, metadata or {}, tensors)


def _members(file: Path, text: str) -> Iterator[tuple[str, str | dict[str, str]]]:
    """Each key of the outer object with its entry as JSON text, or for `__metadata__` its map of strings."""
    position = _opening(file, text, 0)
    end = _CLOSING.match(text, position)
    if end is not None:
        _refuse_rest(file, text, end.end())
        return
    while True:
        name, position = _key(file, text, position)
        if name == "__metadata__":
            strings, position = _string_map(file, text, position)
            yield name, strings
        else:
            entry = _ENTRY.match(text, position)
            if entry is None:
                raise _malformed(file, f"the entry for {name[:200]!r} is no flat object")
            position = entry.end()
            yield name, entry[0]
        more = _MORE.match(text, position)
        if more is None:
            raise _malformed(file, f"character {position} is neither a comma nor the end")
        position = more.end()
        if more[1] == "}":
            break
    _refuse_rest(file, text, position)


def _string_map(file: Path, text: str, position: int) -> tuple[dict[str, str], int]:
    strings: dict[str, str] = {}
    position = _opening(file, text, position)
    end = _CLOSING.match(text, position)
    if end is not None:
        return strings, end.end()
    while True:
        name, position = _key(file, text, position)
        if name in strings:
            raise _malformed(file, f"__metadata__ names {name[:200]!r} twice")
        value = _string(file, text, position)
        if value is None:
            raise _malformed(file, "__metadata__ must map strings to strings")
        strings[name], position = value
        more = _MORE.match(text, position)
        if more is None:
            raise _malformed(file, "__metadata__ does not end")
        position = more.end()
        if more[1] == "}":
            return strings, position


def _refuse_rest(file: Path, text: str, position: int) -> None:
    """Writers pad the header with spaces; nothing else may follow the object."""
    if text[position:].strip(" \t\n\r"):
        raise _malformed(file, f"something follows the object, at character {position}")


def _key(file: Path, text: str, position: int) -> tuple[str, int]:
    """The string at `position`, and where its value begins."""
    key = _string(file, text, position)
    colon = key and _COLON.match(text, key[1])
    if key is None or colon is None:
        raise _malformed(file, f"no name at character {position}")
    return key[0], colon.end()


def _string(file: Path, text: str, position: int) -> tuple[str, int] | None:
    """The JSON string at `position` and where it ends, or None if there is none. Takes no memory beyond its length."""
    opening = _QUOTE.match(text, position)
    if opening is None:
        return None
    start = end = opening.end()
    while True:
        end = text.find('"', end)
        if end < 0:
            return None
        first = end
        while first > start and text[first - 1] == "\\":
            first -= 1
        if (end - first) % 2 == 0:  # not escaped
            return _unescaped(file, text[start:end]), end + 1
        end += 1


def _opening(file: Path, text: str, position: int) -> int:
    opening = _OPENING.match(text, position)
    if opening is None:
        raise _malformed(file, "not a JSON object")
    return opening.end()


def _unescaped(file: Path, raw: str) -> str:
    if "\\" not in raw and raw.isprintable():
        return raw
    try:
        text: str = json.loads(f'"{raw}"')
    except ValueError as error:
        raise _malformed(file, f"{raw[:200]!r} is no JSON string: {error}") from None
    return text


def _tensor(file: Path, name: str, entry: str, *, data_start: int) -> StoredTensor:
    """Check one entry by itself: the right fields, natural numbers, and bytes that fit the shape."""
    try:
        fields = json.loads(entry, object_pairs_hook=list)
    except ValueError as error:
        raise _malformed(file, f"the entry for {name!r} is not JSON: {error}") from None
    by_name = dict(fields)
    if len(fields) != 3 or set(by_name) != {"dtype", "shape", "data_offsets"}:
        raise _malformed(file, f"the entry for {name!r} needs dtype, shape and data_offsets, once each")
    if "-" in entry:  # also "-0", which would read as 0
        raise _malformed(file, f"the entry for {name!r} is not of the form dtype, [sizes], [begin, end]: a minus sign")
    shape, offsets, dtype = by_name["shape"], by_name["data_offsets"], by_name["dtype"]
    if not (
        isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype)
        and _naturals(shape)
        and _naturals(offsets)
        and len(offsets) == 2
    ):
        raise _malformed(file, f"the entry for {name!r} is not of the form dtype, [sizes], [begin, end]")
    if len(shape) > _MAX_DIMENSIONS:
        raise _malformed(file, f"{name!r} has {len(shape)} dimensions")
    begin, end = offsets
    known = DTYPE_NAMES.get(dtype)
    expected = end - begin if known is None else prod(shape) * dtype_bytes(known)
    if end - begin != expected or end < begin:
        raise ValueError(
            f"{file}: {name!r} claims bytes {begin} to {end}, which does not fit its shape {shape} ({dtype}); "
            "the file is damaged"
        )
    return StoredTensor(name, tuple(shape), known or dtype.lower(), file, data_start + begin, end - begin)


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        return False
    return True


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _refuse_gaps(file: Path, tensors: dict[str, StoredTensor], *, data_start: int, size: int) -> None:
    """The format has tensors follow each other from the header to the end of the file."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            raise ValueError(
                f"{file}: {tensor.name!r} at byte {tensor.offset - data_start} {what}; the file is damaged"
            )
        position += tensor.num_bytes
    if position != size:
        why = "it is cut short or damaged" if position > size else "something was appended, or its header is damaged"
        raise ValueError(f"{file}: its tensors end at byte {position}, the file at byte {size}; {why}")


def _malformed(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} has a malformed safetensors header: {why}")
