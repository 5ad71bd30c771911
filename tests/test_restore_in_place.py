"""In-place restores and their undo; and what a kill, a full disk or a meddler leaves behind."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routeguard.checkpoint import in_place, new_folder
from routeguard.checkpoint.in_place import undo_path, undo_restore
from routeguard.checkpoint.restore import restore_checkpoint
from routeguard.storage import copying, durable
from routeguard.storage.locks import folder_lock
from tests.folders import file_bytes, read_header, snapshot, write_pair
from tests.test_restore_checkpoint import changed_in_routing_only

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    write_pair("qwen3_next", tmp_path, tuned_shards="300KB")
    return tmp_path / "base", tmp_path / "tuned"


# -- in place and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["qk", "interpolate", "qk_pro"])
@pytest.mark.parametrize("name", ["qwen3_next", "gpt2", "phi3"])
def test_in_place_gives_what_a_copy_gives_and_undo_gives_it_back(name: str, method: str, tmp_path: Path) -> None:
    write_pair(name, tmp_path, tuned_shards="50KB")
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    before = snapshot(tuned)
    restore_checkpoint(base, tuned, out=tmp_path / "out", method=method)
    assert changed_in_routing_only(tuned, tmp_path / "out") > 0
    report = restore_checkpoint(base, tuned, in_place=True, method=method)
    extra = {"routeguard/provenance.json", "routeguard/undo.safetensors"}
    assert set(snapshot(tuned)) == {*before, *extra}
    for file in tuned.glob("*.safetensors"):
        assert (file_bytes(file) == file_bytes(tmp_path / "out" / file.name)).all()
    assert report.undo == str(undo_path(tuned)) and "routeguard undo" in str(report)
    undone = undo_restore(tuned)
    assert undone.was_complete and undone.num_bytes > 0
    assert snapshot(tuned) == before


def test_an_earlier_record_survives_an_undo(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    restore_checkpoint(base, tuned, out=tmp_path / "out", layers=[3])
    before = snapshot(tmp_path / "out")
    restore_checkpoint(base, tmp_path / "out", in_place=True, roles=("value",))
    assert len(json.loads((tmp_path / "out/routeguard/provenance.json").read_text())["restores"]) == 2
    undo_restore(tmp_path / "out")
    assert snapshot(tmp_path / "out") == before


def test_only_routing_bytes_are_kept_and_written(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    report = restore_checkpoint(base, tuned, in_place=True)
    _, header = read_header(undo_path(tuned))
    kept = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    assert kept == report.restored.changed_bytes  # every routing entry of the test's noise has changed


def test_a_second_restore_and_a_second_undo_are_refused(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    restore_checkpoint(base, tuned, in_place=True)
    restored = snapshot(tuned)
    with pytest.raises(ValueError, match=r"was restored in place already.*routeguard undo"):
        restore_checkpoint(base, tuned, in_place=True)
    assert snapshot(tuned) == restored
    undo_restore(tuned)
    with pytest.raises(ValueError, match="was not restored in place, or was undone"):
        undo_restore(tuned)


def test_a_copy_of_a_folder_restored_in_place_has_no_undo_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    restore_checkpoint(base, tuned, in_place=True)
    (tuned / "elsewhere").symlink_to(base)
    (tuned / "broken").symlink_to(tmp_path / "nothing")
    report = restore_checkpoint(base, tuned, out=tmp_path / "out")
    assert set(report.left_out) == {"routeguard/undo.safetensors", "broken", "elsewhere"} and "broken" in str(report)
    assert not undo_path(tmp_path / "out").exists()
    (tuned / "routeguard" / "provenance.json").unlink()  # as after a kill before the record was written
    for folders in ((base, tuned), (tuned, base)):
        with pytest.raises(ValueError, match="interrupted in-place restore"):
            restore_checkpoint(*folders, out=tmp_path / "other")


def test_links_are_not_written_through(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    (shard,) = [f for f in tuned.glob("*.safetensors") if b"layers.3.self_attn.q_proj" in f.read_bytes()][:1]
    elsewhere = tmp_path / "blob"
    os.link(shard, elsewhere)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"has 2 hard links.*--out"):
        restore_checkpoint(base, tuned, in_place=True)
    shard.unlink()
    shard.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"is a link to .*--out"):
        restore_checkpoint(base, tuned, in_place=True)
    assert snapshot(tmp_path) == before


def test_undo_refuses_what_was_changed_since(pair: tuple[Path, Path]) -> None:
    base, tuned = pair
    before = snapshot(tuned)
    restore_checkpoint(base, tuned, in_place=True)
    facts = json.loads((tuned / "routeguard/provenance.json").read_text())["restores"][-1]["tensors"][0]
    shard = tuned / facts["file"]
    start, header = read_header(shard)
    at = start + header[facts["tensor"]]["data_offsets"][0]
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match="was changed since it was restored in place"):
        undo_restore(tuned)
    undo_restore(tuned, insist=True)
    assert snapshot(tuned) == before


def test_undo_refuses_another_file_and_a_damaged_undo_file(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pair
    restore_checkpoint(base, tuned, in_place=True)
    undo = undo_path(tuned)
    whole = undo.read_bytes()
    undo.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged: the old rows"):
        undo_restore(tuned)
    undo.write_bytes(whole)
    shard = tuned / json.loads((tuned / "routeguard/provenance.json").read_text())["restores"][-1]["tensors"][0]["file"]
    kept = shard.read_bytes()
    shard.write_bytes((base / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="was replaced since"):
        undo_restore(tuned)
    shard.unlink()
    with pytest.raises(ValueError, match="is not there any more"):
        undo_restore(tuned)
    shard.write_bytes(kept)
    undo_restore(tuned)


# -- failures while writing --------------------------------------------------------------------------------------------


def full_disk(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "name"),
    [(copying, "_copy"), (new_folder, "apply_patches"), (new_folder, "record_restore"), (new_folder, "sync")],
)
def test_a_full_disk_leaves_nothing_of_the_copy(
    module: Any, name: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair
    before = snapshot(tmp_path)
    monkeypatch.setattr(module, name, full_disk)
    with pytest.raises(OSError, match="No space left"):
        restore_checkpoint(base, tuned, out=tmp_path / "new" / "parents" / "out")
    assert snapshot(tmp_path) == before and sorted(p.name for p in tmp_path.iterdir()) == ["base", "tuned"]


@pytest.mark.parametrize(
    ("module", "name"), [(in_place, "apply_patches"), (in_place, "record_restore"), (in_place, "write_safetensors")]
)
def test_a_failure_in_place_puts_the_old_bytes_back(
    module: Any, name: str, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair
    before = snapshot(tuned)
    real = getattr(module, name)
    calls = []

    def fail_once(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return real(*arguments, **options)
        if name == "apply_patches":
            real(arguments[0][:1])  # some rows are written, then the disk fails
        return full_disk()

    monkeypatch.setattr(module, name, fail_once)
    with pytest.raises(OSError, match="No space left"):
        restore_checkpoint(base, tuned, in_place=True)
    assert calls and snapshot(tuned) == before


def test_a_real_limit_on_file_sizes_is_a_clear_end(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The platform itself refuses to write: exit code 3, one line, nothing left."""
    pytest.importorskip("resource")
    base, tuned = pair
    before = snapshot(tmp_path)
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from routeguard.cli.main import app; app()"
    )
    command = [sys.executable, "-c", code, "restore", str(base), str(tuned), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "File too large" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert snapshot(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """A folder of a user whom permissions bind, and this process as that user while the test runs."""
    if not hasattr(os, "geteuid"):
        pytest.skip("permissions of this kind do not exist here")
    with tempfile.TemporaryDirectory() as name:
        superuser = os.geteuid() == 0
        folder = Path(name)
        if superuser:
            folder.chmod(0o777)
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if superuser:
                os.seteuid(0)


def test_read_only_places_are_a_clear_end(ordinary_user: Path) -> None:
    base, tuned, closed = (ordinary_user / name for name in ("base", "tuned", "closed"))
    write_pair("lfm2", ordinary_user)
    for file in tuned.iterdir():
        file.chmod(0o444)
    before = snapshot(tuned)
    with pytest.raises(PermissionError):
        restore_checkpoint(base, tuned, in_place=True)
    assert snapshot(tuned) == before
    restore_checkpoint(base, tuned, out=ordinary_user / "out")  # reading is enough for a copy
    closed.mkdir(mode=0o555)
    with pytest.raises(PermissionError):
        restore_checkpoint(base, tuned, out=closed / "out")
    assert not any(closed.iterdir())


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair
    real = new_folder.record_restore

    def slow(folder: Path, facts: dict[str, Any]) -> None:
        real(folder, facts)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(new_folder, "record_restore", slow)
    with pytest.raises(ValueError, match="has appeared while the copy was made"):
        restore_checkpoint(base, tuned, out=tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out", "tuned"]


def test_a_file_that_changes_while_it_is_copied_is_noticed(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = pair
    real = copying._copy

    def meddle(reader: int, writer: int, size: int, advance: Any) -> str:
        how = real(reader, writer, size, advance)
        os.utime(tuned / "config.json", ns=(1, 1))
        return how

    monkeypatch.setattr(copying, "_copy", meddle)
    with pytest.raises(ValueError, match="changed while it was copied"):
        restore_checkpoint(base, tuned, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_partial_copies_of_killed_runs_are_removed_and_live_ones_are_not(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, tuned = pair
    dead, live, other = (tmp_path / f".out.{token}.partial" for token in ("0" * 8, "1" * 8, "mine"))
    for folder in (dead, live, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
    with folder_lock(live) as held:
        assert held
        places = f"{str(base)!r}, {str(tuned)!r}, out={str(tmp_path / 'out')!r}"
        code = f"from routeguard import restore_checkpoint; restore_checkpoint({places})"
        subprocess.run([sys.executable, "-c", code], check=True)
    assert not dead.exists() and live.exists() and other.exists()
    assert (tmp_path / "out").is_dir()


# -- copying -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["whatever the platform has", "in the kernel", "plain", "plain after a part"])
@pytest.mark.parametrize("size", [0, 1, 5_000_000, 9 * 2**20 + 3])
def test_every_way_of_copying_gives_the_same_bytes(
    way: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "whatever the platform has":
        monkeypatch.setattr(copying, "_reflink", lambda reader, writer: False)
    if way == "plain":  # macOS, Windows
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    if way == "plain after a part":
        if not hasattr(os, "copy_file_range"):
            pytest.skip("no copy_file_range here")
        real = os.copy_file_range

        def some(reader: int, writer: int, count: int, at: int, to: int) -> int:
            if at:
                raise OSError(errno.EINVAL, "not here")
            return real(reader, writer, min(count, 1_000_003), at, to)

        monkeypatch.setattr(os, "copy_file_range", some)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(size))
    source.chmod(0o640)
    seen: list[int] = []
    how = copying.copy_file(source, target, seen.append)
    assert target.read_bytes() == source.read_bytes() and sum(seen) == size
    assert target.stat().st_mode & 0o777 == 0o640
    if way == "plain" and size:
        assert how == "plain"
    with pytest.raises(FileExistsError):
        copying.copy_file(source, target)


def test_a_written_file_is_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    durable.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), durable.written_beside(path) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileExistsError), durable.written_beside(path, exclusive=True) as beside:
        beside.write_text("other")
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


# -- kills -------------------------------------------------------------------------------------------------------------


def killed(what: str, folder: Path, stride: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.kill_points", what, str(folder), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+) (\{.*\})\s*", done.stdout)
    assert found, done.stdout
    outcomes: dict[str, int] = json.loads(found[2].replace("'", '"'))
    return outcomes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("copy", {"absent"}),
        ("in-place", {"untouched", "in the middle", "restored"}),
        ("undo", {"undone at the second try"}),
    ],
)
def test_killed_at_any_line_nothing_is_lost(what: str, expected: set[str], stride: int, tmp_path: Path) -> None:
    write_pair("qwen3_next", tmp_path, tuned_shards="300KB")
    outcomes = killed(what, tmp_path, stride)
    assert expected <= set(outcomes), outcomes
    assert sum(outcomes.values()) > 15
