"""Restore a checkpoint where it lies, with an undo file from which `undo_restore` brings back every old byte."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from routeguard.checkpoint.patch import Patch, apply_patches, patched_files
from routeguard.checkpoint.provenance import forget_last_restore, read_restores, record_restore
from routeguard.checkpoint.sidecar import SIDECAR_FOLDER
from routeguard.routes.collection import rows_from_json
from routeguard.routes.wording import as_printed
from routeguard.storage.durable import sync, written_beside
from routeguard.storage.header import StoredTensor, read_header
from routeguard.storage.locks import folder_lock
from routeguard.storage.row_bytes import row_chunks
from routeguard.storage.writer import Outgoing, write_safetensors

SCHEMA_VERSION = 1
UNDO_FILE = "undo.safetensors"
_METADATA_KEY = "routeguard_undo"


@dataclass(frozen=True)
class UndoReport:
    """What `undo_restore` did: how many tensors and bytes went back, in which files."""

    folder: str
    tensors: tuple[str, ...]
    num_bytes: int
    was_complete: bool

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "folder": self.folder, "tensors": list(self.tensors),
                "num_bytes": self.num_bytes, "was_complete": self.was_complete}  # fmt: skip

    def __str__(self) -> str:
        what = "" if self.was_complete else " (the restore had been interrupted)"
        return (
            f"undid the restore of {self.folder}{what}: {len(self.tensors)} tensors, {self.num_bytes:,} bytes are back"
        )

    _repr_pretty_ = as_printed


def undo_path(folder: Path) -> Path:
    return folder / SIDECAR_FOLDER / UNDO_FILE


def refuse_unsafe_in_place(folder: Path, files: Iterable[Path]) -> None:
    """Raise ValueError where writing in place would reach beyond this folder, or over an earlier undo file."""
    undo = undo_path(folder)
    if undo.exists():
        state = "was restored in place already" if _is_complete(folder, undo) else "holds an interrupted restore"
        raise ValueError(
            f"{folder} {state}: {undo} still has its old rows. Run `routeguard undo {folder}` first, or delete "
            "that file to keep the present state for good"
        )
    for file in files:
        if file.is_symlink():
            raise ValueError(
                f"{file} is a link to {file.resolve()} (as in the Hub's cache): writing in place would change that "
                "file for everyone who links to it. Write a copy with --out"
            )
        links = file.stat().st_nlink
        if links > 1:
            raise ValueError(
                f"{file} has {links} hard links: writing in place would change all of them. Write a copy with --out"
            )


def refuse_interrupted(folder: Path) -> None:
    """Raise ValueError for a folder in which an in-place restore (or its undo) stopped half way."""
    undo = undo_path(folder)
    if undo.exists() and not _is_complete(folder, undo):
        raise ValueError(
            f"{folder} holds an interrupted in-place restore, so its weights are half tuned, half restored. Run "
            f"`routeguard undo {folder}` first"
        )


def patch_in_place(folder: Path, patches: Sequence[Patch], facts: dict[str, Any]) -> Path:
    """Keep the old rows in the undo file, write the new ones over them, record the restore. Returns the undo file.

    Killed at any point, `undo_restore` brings the old bytes back (or nothing has been written yet). On an error the
    old bytes are put back before it is raised.
    """
    with folder_lock(folder) as held:
        _refuse_busy(folder, held)
        return _patch_in_place(folder, patches, facts)


def _patch_in_place(folder: Path, patches: Sequence[Patch], facts: dict[str, Any]) -> Path:
    for file in patched_files(patches):  # before anything is written: may it be?
        file.open("r+b").close()
    undo = undo_path(folder)
    if undo.parent.is_symlink():
        raise ValueError(
            f"{undo.parent} is a link, so the undo file would not be beside the weights; write a copy instead"
        )
    new_folder = not undo.parent.exists()
    undo.parent.mkdir(exist_ok=True)
    for leftover in undo.parent.glob(f".{UNDO_FILE}.*.partial"):  # of a run that was killed before it wrote any weight
        leftover.unlink()
    identity = secrets.token_hex(8)
    try:
        _write_undo(undo, patches, identity)
    except BaseException:
        if new_folder:
            undo.parent.rmdir()
        raise
    try:
        apply_patches(patches)
        record_restore(folder, {**facts, "undo": identity})
    except BaseException:
        apply_patches(_old_rows(folder, _read_undo(undo)))
        undo.unlink()
        raise
    return undo


def undo_restore(folder: str | PathLike[str], *, insist: bool = False) -> UndoReport:
    """Bring back every byte that an in-place restore wrote over, also after a kill in its middle.

    Args:
        folder: the checkpoint folder that was restored in place.
        insist: go on although the restored rows were changed by something else since. Default: no.

    Raises:
        ValueError: no undo file; it, or a file that it is for, was changed or is damaged. Nothing is then written.
    """
    folder = Path(folder)
    if not undo_path(folder).is_file():
        raise ValueError(f"{folder} has no {SIDECAR_FOLDER}/{UNDO_FILE}: it was not restored in place, or was undone")
    with folder_lock(folder) as held:
        _refuse_busy(folder, held)
        return _undo(folder, insist=insist)


def _refuse_busy(folder: Path, held: bool | None) -> None:
    if held is False:
        raise ValueError(f"{folder} is being restored or undone by another process; wait for it to end")


def _undo(folder: Path, *, insist: bool) -> UndoReport:
    undo = undo_path(folder)
    if not undo.is_file():
        raise ValueError(f"{folder} has no {SIDECAR_FOLDER}/{UNDO_FILE}: it was not restored in place, or was undone")
    facts = _read_undo(undo)
    patches = _old_rows(folder, facts)
    kept = _digests(patch.values() for patch in patches)
    for patch, entry, digest in zip(patches, facts["entries"], kept, strict=True):
        if digest != entry["sha256"]:
            raise ValueError(f"{undo} is damaged: the old rows of {patch.tensor.name} do not match their hash")
    complete = _is_complete(folder, undo)
    if complete and not insist:
        _refuse_changed(folder, patches)
    if complete:
        forget_last_restore(folder)  # from here on the folder counts as half undone
    apply_patches(patches)
    undo.unlink()
    sync(undo.parent)
    if not any(undo.parent.iterdir()):
        undo.parent.rmdir()
    names = tuple(dict.fromkeys(patch.tensor.name for patch in patches))
    return UndoReport(str(folder), names, sum(patch.num_bytes for patch in patches), complete)


def _is_complete(folder: Path, undo: Path) -> bool:
    """Whether the restore that an undo file belongs to came to its end (and its undoing has not begun)."""
    restores = read_restores(folder)
    return bool(restores) and restores[-1].get("undo") == _read_undo(undo)["identity"]


def _write_undo(undo: Path, patches: Sequence[Patch], identity: str) -> None:
    digests = _digests(patch.current() for patch in patches)
    entries = [
        {
            "file": patch.tensor.file.name,
            "tensor": patch.tensor.name,
            "rows": patch.rows,
            "dim": patch.dim,
            "sha256": sha256,
        }
        for patch, sha256 in zip(patches, digests, strict=True)
    ]
    files = {file.name: _identity(file) for file in patched_files(patches)}
    facts = {"schema_version": SCHEMA_VERSION, "identity": identity, "entries": entries, "files": files}
    outgoing = [
        Outgoing(str(number), "uint8", [patch.num_bytes], patch.num_bytes, patch.current())
        for number, patch in enumerate(patches)
    ]
    with written_beside(undo, exclusive=True) as beside:
        write_safetensors(beside, outgoing, {_METADATA_KEY: json.dumps(facts)})


def _read_undo(undo: Path) -> dict[str, Any]:
    header = read_header(undo)
    text = header.metadata.get(_METADATA_KEY)
    if text is None:
        raise ValueError(f"{undo} is not an undo file that routeguard wrote")
    facts: Any = json.loads(text)
    if not isinstance(facts, dict) or facts.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{undo} is not of schema version {SCHEMA_VERSION}, which this version reads")
    kinds = {"identity": str, "files": dict, "entries": list}
    whole = all(isinstance(facts.get(name), kind) for name, kind in kinds.items()) and all(
        isinstance(entry, dict) and {"file", "tensor", "rows", "dim", "sha256"} <= set(entry)
        for entry in facts["entries"]
    )
    if not whole or len(header.tensors) != len(facts["entries"]):
        raise ValueError(f"{undo} is damaged: its description of the old rows is incomplete")
    facts["tensors"] = header.tensors
    return facts


def _old_rows(folder: Path, facts: dict[str, Any]) -> list[Patch]:
    """Patches that put the kept rows back. Raises ValueError when a file is not the one that was restored."""
    tensors: dict[tuple[str, str], StoredTensor] = {}
    for name, identity in facts["files"].items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"{file} was restored in place, and is not there any more; nothing was written")
        if file.is_symlink():
            raise ValueError(f"{file} has become a link since it was restored in place; nothing was written")
        if _identity(file) != identity:
            raise ValueError(f"{file} was replaced since it was restored in place; nothing was written")
        tensors |= {(name, tensor.name): tensor for tensor in read_header(file).tensors.values()}
    patches = []
    for number, entry in enumerate(facts["entries"]):
        kept = facts["tensors"].get(str(number))
        place = tensors.get((entry["file"], entry["tensor"]))
        if kept is None or place is None:
            raise ValueError(f"{undo_path(folder)} is damaged: it speaks of {entry['tensor']!r}, which is not there")
        patches.append(Patch(place, rows_from_json(entry["rows"]), entry["dim"], _reader(kept)))
    return patches


def _reader(kept: StoredTensor) -> Any:
    return lambda: row_chunks(kept, None, 0)


def _identity(file: Path) -> list[object]:
    """Size and header of a file: what a restore leaves as it is."""
    header = read_header(file)
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.sha256(stream.read(header.data_start)).hexdigest()]


def _refuse_changed(folder: Path, patches: Sequence[Patch]) -> None:
    written = {
        (tensor["file"], tensor["tensor"], json.dumps(tensor["rows"])): tensor["sha256"]
        for tensor in read_restores(folder)[-1]["tensors"]
    }
    for patch, digest in zip(patches, _digests(patch.current() for patch in patches), strict=True):
        key = (patch.tensor.file.name, patch.tensor.name, json.dumps(patch.rows))
        if digest != written.get(key):
            raise ValueError(
                f"{patch.tensor.name} in {patch.tensor.file} was changed since it was restored in place; undoing would "
                "lose that change. Insist (insist=True, --insist) to undo all the same"
            )


def _digests(parts: Iterable[Iterable[bytes]]) -> list[str]:
    with ThreadPoolExecutor(2) as workers:  # hashing leaves the interpreter's lock
        return list(workers.map(_digest, parts))


def _digest(chunks: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(chunk)
    return total.hexdigest()
