"""Safetensors files and indices that nobody vouches for: a clear error, in bounded memory, and never a wrong answer."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from routeguard import checkpoint_drift, find_routes, restore_checkpoint
from routeguard.storage.folder import stored_checkpoint, stored_tensors
from routeguard.storage.header import DTYPE_NAMES, MAX_HEADER_BYTES, read_header
from tests.folders import snapshot, write_file, write_pair

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
GOOD = json.dumps(ENTRY)


def raw_file(path: Path, header: str | bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(**changes: Any) -> str:
    return json.dumps({"w": {**ENTRY, **changes}})


# -- what the format allows is read as safetensors reads it ------------------------------------------------------------


def test_a_file_of_safetensors_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    tensors = {
        "plain": torch.randn(3, 5),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        'odd "name" \\ with {braces}, π': torch.randn(2).to(torch.bfloat16),
        "whole": torch.arange(6, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "note": 'a "quoted" {note}, \n and π'})
    header = read_header(tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    with safe_open(tmp_path / "a.safetensors", "pt") as stream:
        assert header.metadata == stream.metadata()
        assert set(header.tensors) == set(stream.keys()) == set(tensors)
        for name, found in header.tensors.items():
            tensor = stream.get_tensor(name)
            assert found.shape == tuple(tensor.shape) and f"torch.{found.dtype}" == str(tensor.dtype)
            raw = data[found.offset : found.offset + found.num_bytes]
            assert raw == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("header", ["{}", "  {  }  ", '{"__metadata__":{}}', '{"__metadata__": {"a": "b"} }   '])
def test_a_file_without_tensors_is_one(header: str, tmp_path: Path) -> None:
    assert read_header(raw_file(tmp_path / "a.safetensors", header)).tensors == {}


# -- what it does not allow --------------------------------------------------------------------------------------------

HOSTILE = {
    "nothing": (b"", "not a safetensors file"),
    "cut in the length": (b"\x01\x02\x03", "not a safetensors file"),
    "huge length": (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
    "length beyond the file": (struct.pack("<Q", 1000) + b"{}", "not a safetensors file"),
    "length zero": (struct.pack("<Q", 0) + b"{}", "not a safetensors file"),
}
MALFORMED = {
    "not JSON": ("hello", b"", "not a JSON object"),
    "a list": ("[1, 2]", b"", "not a JSON object"),
    "not UTF-8": (b'{"\xff": 1}', b"", "malformed"),
    "never closed": ('{"w": {"dtype": "F32"', b"", "malformed"),
    "something after": (entry() + ' {"x": 1}', b"\0" * 16, "something follows"),
    "a duplicate": (f'{{"w": {GOOD}, "w": {GOOD}}}', b"\0" * 16, "appears twice"),
    "a duplicate by escape": (
        f'{{"w": {GOOD}, "\\u0077": {GOOD}}}', b"\0" * 16, "appears twice",
    ),
    "a field twice": ('{"w":{"dtype":"F32","shape":[2,2],"shape":[4],"data_offsets":[0,16]}}', b"\0" * 16, "once each"),
    "a field missing": ('{"w": {"dtype":"F32","shape":[2,2]}}', b"\0" * 16, "once each"),
    "a field more": (entry(extra=[1]), b"\0" * 16, "once each"),
    "metadata twice": ('{"__metadata__":{"a":"b"},"__metadata__":{"a":"b"}}', b"", "appears twice"),
    "metadata of numbers": ('{"__metadata__":{"a":1}}', b"", "strings to strings"),
    "nested metadata": ('{"__metadata__":{"a":{"b":"c"}}}', b"", "strings to strings"),
    "nested entry": ('{"w": {"dtype": {"x": 1}}}', b"", "no flat object"),
    "entry is a list": ('{"w": [1, 2]}', b"", "no flat object"),
    "negative size": (entry(shape=[-2, -2]), b"\0" * 16, "not of the form"),
    "size is a float": (entry(shape=[2.0, 2]), b"\0" * 16, "not of the form"),
    "size is a bool": (entry(shape=[True, 4]), b"\0" * 16, "not of the form"),
    "size is huge": (entry(shape=[2**70]), b"\0" * 16, "not of the form"),
    "sizes overflow": (entry(shape=[2**62, 2**62]), b"\0" * 16, "does not fit its shape"),
    "too many dimensions": (entry(shape=[1] * 100 + [2, 2]), b"\0" * 16, "dimensions"),
    "offsets backwards": (entry(data_offsets=[16, 0]), b"\0" * 16, "does not fit its shape"),
    "negative offset": (entry(data_offsets=[-16, 0]), b"\0" * 16, "not of the form"),
    "one offset": (entry(data_offsets=[0]), b"\0" * 16, "not of the form"),
    "wrong size": (entry(data_offsets=[0, 12]), b"\0" * 12, "does not fit its shape"),
    "beyond the end": (entry(data_offsets=[0, 16]), b"\0" * 15, "cut short"),
    "bytes after": (entry(), b"\0" * 17, "appended"),
    "a gap at the start": (entry(data_offsets=[4, 20]), b"\0" * 20, "leaves a gap"),
    "an overlap": (
        json.dumps({"w": ENTRY, "v": {**ENTRY, "data_offsets": [8, 24]}}), b"\0" * 24, "overlaps the tensor before",
    ),
    "the same bytes twice": (json.dumps({"w": ENTRY, "v": ENTRY}), b"\0" * 16, "overlaps the tensor before"),
    "a gap between": (
        json.dumps({"w": ENTRY, "v": {**ENTRY, "data_offsets": [20, 36]}}), b"\0" * 36, "leaves a gap",
    ),
    "a space that is none in JSON": (entry().replace(": {", ":\x0b{", 1), b"\0" * 16, "no flat object"),
    "a zero after the object": (entry() + "\0", b"\0" * 16, "something follows"),
    "minus zero": (entry().replace("[0,", "[-0,"), b"\0" * 16, "not of the form"),
    "a bad escape": (f'{{"\\x": {GOOD}}}', b"\0" * 16, "no JSON string"),
    "a control character": (f'{{"a\x01": {GOOD}}}', b"\0" * 16, "no JSON string"),
    "a long entry": (entry(dtype="F" * 10_000), b"\0" * 16, "no flat object"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_lengths(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers(case: str, tmp_path: Path) -> None:
    header, data, message = MALFORMED[case]
    with pytest.raises(ValueError, match=message):
        read_header(raw_file(tmp_path / "a.safetensors", header, data))


def test_one_good_file_among_these_is_good(tmp_path: Path) -> None:
    """The control: the entry that the cases above spoil is itself accepted."""
    assert read_header(raw_file(tmp_path / "a.safetensors", entry(), b"\0" * 16)).tensors["w"].shape == (2, 2)


@pytest.mark.parametrize(
    "content",
    ["[" * 2_000_000, '{"a":' * 400_000, '{"__metadata__":{' + '"a":{' * 400_000, '{"w":{"shape":[' + "[]," * 600_000],
    ids=["lists", "objects", "metadata", "shape"],
)
def test_deep_and_wide_headers_take_little_memory(content: str, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "a.safetensors", content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="malformed"):
            read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(content) + 1_000_000


def test_a_large_honest_header_takes_memory_in_proportion(tmp_path: Path) -> None:
    names = [f"model.layers.{n // 512}.mlp.experts.{n % 512}.gate_proj.weight" for n in range(30_000)]
    path = tmp_path / "a.safetensors"
    write_file(path, {name: ("BF16", [1, 1], b"\0\0") for name in names})
    header_bytes = path.stat().st_size - 2 * len(names)
    tracemalloc.start()
    try:
        found = stored_tensors([path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == len(names)
    assert peak < 10 * header_bytes, peak / header_bytes


def test_the_formats_own_limit_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as stream:  # sparse: takes no space
        stream.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        stream.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(path)


# -- indices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../model.safetensors"}, "not a file inside the folder"),
        ({"a": "/etc/passwd"}, "not a file inside the folder"),
        ({"a": "..\\model.safetensors"}, "not a file inside the folder"),
        ({"a": ".."}, "not a file inside the folder"),
        ({"a": ""}, "not a file inside the folder"),
        ({"a": "missing.safetensors"}, "is missing"),
        ({"a": 3}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
    ids=str,
)
def test_hostile_indices(weight_map: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=message):
        stored_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "\udcff".encode("utf-8", "surrogateescape"), "7", "null"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_files_that_are_none(name: str, text: str | bytes, tmp_path: Path) -> None:
    write_pair("lfm2", tmp_path)
    if name != "config.json":  # where there is one file, nobody reads an index
        (tmp_path / "tuned" / "model.safetensors").unlink()
    (tmp_path / "tuned" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=name):
        find_routes(tmp_path / "tuned")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.safetensors", {"w": ("F32", [1], b"\0" * 4)})
    with pytest.raises(ValueError, match="holds the same tensor"):
        stored_tensors([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


# -- fuzzing -----------------------------------------------------------------------------------------------------------


def accepted_by_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as stream:
            list(stream.keys())
    except (SafetensorError, ValueError, OverflowError):
        return False
    return True


def check_like_safetensors(path: Path) -> None:
    """We read it, or refuse it with a ValueError; and we never read what safetensors itself refuses."""
    try:
        header = read_header(path)
    except ValueError:
        return
    if any(tensor.dtype not in DTYPE_NAMES.values() for tensor in header.tensors.values()):
        return  # a dtype that we do not know is passed over, for formats to come
    assert accepted_by_safetensors(path), path.read_bytes()[:400]


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5))
SIZES = st.lists(st.one_of(st.integers(0, 4), st.integers(-3, 2**66), SCALARS), max_size=4)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "U8", "F4", "X"]), SCALARS),
        "shape": SIZES,
        "data_offsets": SIZES,
    }
)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    entries=st.dictionaries(st.text(max_size=6), st.one_of(ENTRIES, SCALARS), max_size=4), data=st.binary(max_size=64)
)
def test_made_up_headers_end_in_a_clear_error(entries: dict[str, Any], data: bytes, tmp_path: Path) -> None:
    check_like_safetensors(raw_file(tmp_path / "a.safetensors", json.dumps(entries), data))


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=st.binary(max_size=120), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)), data=st.binary(max_size=40)
)
@example(header=b'{"w":{}}', length=None, data=b"")
def test_random_bytes_end_in_a_clear_error(header: bytes, length: int | None, data: bytes, tmp_path: Path) -> None:
    check_like_safetensors(raw_file(tmp_path / "a.safetensors", header, data, length=length))


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), insert=st.booleans())
def test_a_damaged_byte_of_a_header_ends_in_a_clear_error(
    place: float, byte: int, insert: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {"a": ("F32", [2, 2], b"\0" * 16), "b": ("BF16", [3], b"\1" * 6)}, {"format": "pt"})
    whole = bytearray(path.read_bytes())
    at = int(place * (len(whole) - 23))
    whole[at : at if insert else at + 1] = bytes([byte])
    path.write_bytes(whole)
    check_like_safetensors(path)


@pytest.mark.slow
def test_every_byte_of_a_header_damaged_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {"a": ("F32", [2, 2], b"\0" * 16), "b": ("BF16", [3], b"\1" * 6)}, {"format": "pt"})
    whole = path.read_bytes()
    header, data = whole[8:-22], whole[-22:]
    for at in range(len(header)):
        for byte in range(256):
            damaged = bytes([byte])
            for text in (header[:at] + damaged + header[at + 1 :], header[:at] + damaged + header[at:]):
                check_like_safetensors(raw_file(path, text, data))


@pytest.mark.slow
@settings(
    max_examples=4000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    entries=st.dictionaries(st.text(max_size=6), st.one_of(ENTRIES, SCALARS), max_size=4), data=st.binary(max_size=64)
)
def test_many_made_up_headers(entries: dict[str, Any], data: bytes, tmp_path: Path) -> None:
    check_like_safetensors(raw_file(tmp_path / "a.safetensors", json.dumps(entries), data))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_pair("lfm2", folder, tuned_shards="100KB")
    return folder


@settings(max_examples=60, deadline=None, derandomize=True)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), which=st.integers(0, 50))
def test_a_damaged_checkpoint_is_restored_right_or_not_at_all(
    folders: Path, place: float, byte: int, which: int
) -> None:
    """One byte of TUNED's header, index or config is changed: the restore refuses, or changes routing bytes only."""
    from tests.test_restore_checkpoint import changed_in_routing_only

    out = folders / "out"
    files = sorted(path for path in (folders / "tuned").iterdir() if path.suffix in (".json", ".safetensors"))
    file = files[which % len(files)]
    whole = file.read_bytes()
    size = len(whole) if file.suffix == ".json" else 8 + struct.unpack("<Q", whole[:8])[0]
    at = int(place * (size - 1))
    file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    try:
        before = snapshot(folders / "tuned")
        try:
            restore_checkpoint(folders / "base", folders / "tuned", out=out)
        except ValueError:
            assert not out.exists()
        else:
            changed_in_routing_only(folders / "tuned", out)
        with contextlib.suppress(ValueError):
            checkpoint_drift(folders / "base", folders / "tuned")
        assert snapshot(folders / "tuned") == before
    finally:
        file.write_bytes(whole)
        shutil.rmtree(out, ignore_errors=True)
