"""Write a patched copy of a checkpoint folder that appears under its name only when it is whole and on the disk."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from routeguard.checkpoint.in_place import undo_path
from routeguard.checkpoint.job import Job, Report
from routeguard.checkpoint.patch import apply_patches
from routeguard.checkpoint.provenance import record_restore
from routeguard.checkpoint.row_plan import Progress
from routeguard.storage.copying import Advance, copy_file
from routeguard.storage.durable import Flusher, sync
from routeguard.storage.folder import is_adapter_folder, safetensors_files, weight_files
from routeguard.storage.locks import folder_lock

# What Trainer, Accelerate and DeepSpeed keep to go on training: it belongs to the tuned weights, not to restored ones.
_TRAINING_STATE = re.compile(
    r"^(optimizer(_\d+)?\.(pt|bin|safetensors)|scheduler(_\d+)?\.(pt|bin)|scaler(_\d+)?\.(pt|bin)"
    r"|rng_state.*\.pth|random_states_\d+\.pkl|trainer_state\.json|latest|zero_to_fp32\.py)$"
)
_ELSEWHERE = re.compile(r"^(\.git|\.cache|checkpoint-\d+|global_step\d+|pytorch_model_fsdp_\d+|optimizer_\d+)$")


def files_to_copy(tuned: Path) -> tuple[list[Path], list[str]]:
    """The files of a checkpoint (relative), and what stays behind: training state, other checkpoints, no files."""
    kept: list[Path] = []
    left_out: list[str] = []
    repaired = [] if is_adapter_folder(tuned) else safetensors_files(tuned)
    other_weights = [] if is_adapter_folder(tuned) else [path for path in weight_files(tuned) if path not in repaired]
    for path in sorted(tuned.iterdir()):
        is_folder = path.is_dir()
        if (_ELSEWHERE if is_folder else _TRAINING_STATE).match(path.name) or path in other_weights:
            left_out.append(path.name)
            continue
        if is_folder and path.is_symlink():
            left_out.append(path.name)
            continue
        for found in sorted(path.rglob("*")) if is_folder else [path]:
            name = found.relative_to(tuned)
            if name == undo_path(Path()) or _is_partial(found.name):
                left_out.append(str(name))  # it belongs to the weights in that folder, or to a run that was killed
            elif found.is_file():
                kept.append(name)
            elif not found.is_dir() or found.is_symlink():
                left_out.append(str(name))  # a pipe, a broken link, a link to another folder
    return kept, left_out


def write_copy(tuned: Path, out: Path, prepare: Callable[[], Job[Report]], advance: Advance) -> Job[Report]:
    """Copy TUNED's files to OUT while the job is prepared, then apply its patches and record its facts.

    Killed at any point, OUT is either absent or whole. On an error, also of `prepare`, nothing of it is left; TUNED is
    only read.

    Args:
        tuned, out: folders; `out` must not exist.
        prepare: reads and compares the rows, and says what to write.
        advance: called from a thread with the bytes of each piece that is copied.

    Raises OSError from the platform (disk full, no permission), and what `prepare` raises.
    """
    files, _ = files_to_copy(tuned)
    with _whole_or_nothing(out) as beside:
        with _Copying(tuned, beside, files, advance) as copying:
            job = prepare()
            copying.wait()
        apply_patches(job.patches, folder=beside)
        record_restore(beside, job.facts)
        for folder in {beside, *((beside / file).parent for file in files)}:
            sync(folder)
    return job


def copied_with(
    tuned: Path, out: Path, prepare: Callable[[], Job[Report]], progress: Progress
) -> tuple[Job[Report], int, tuple[str, ...]]:
    """`write_copy` that reports its progress; returns the job, the bytes of the files, and the names left out."""
    files, left_out = files_to_copy(tuned)
    total = sum((tuned / file).stat().st_size for file in files)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("copying", done, total)

    return write_copy(tuned, out, prepare, advance), total, tuple(left_out)


class _Copying:
    """Files being copied by one thread and flushed to the disk by another; leaving the block ends both."""

    def __init__(self, source: Path, target: Path, files: Sequence[Path], advance: Advance) -> None:
        self.source = source
        self.target = target
        self.files = files
        self.advance = advance
        self._stopped = threading.Event()
        self._flusher = Flusher()
        self._copier = ThreadPoolExecutor(1)
        self._copied = self._copier.submit(self._copy)

    def __enter__(self) -> _Copying:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._copier.shutdown()
        self._flusher.close()

    def wait(self) -> None:
        """Until every file is copied and on the disk. Raises what copying raised."""
        self._copied.result()
        self._flusher.wait()

    def _copy(self) -> None:
        for file in self.files:
            target = self.target / file
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(self.source / file, target, partial(self._one_piece, target))
            self._flusher.finish(target)

    def _one_piece(self, target: Path, count: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError("the copy was given up")
        self._flusher.early(target)
        self.advance(count)


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    missing = [folder for folder in out.parents if not folder.exists()]
    beside = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            with folder_lock(out.parent, wait=True):  # until the new folder is locked, others must not look at it
                _remove_abandoned(out)
                beside.mkdir()
                held.enter_context(folder_lock(beside))
            yield beside
            if out.exists():  # made meanwhile; an empty folder would be replaced silently
                raise ValueError(f"{out} has appeared while the copy was made; nothing was written there")
            os.rename(beside, out)
            sync(out.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if not out.exists():
            _remove_empty(missing)


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # something else has come to lie there
        for folder in folders:
            folder.rmdir()


def _remove_abandoned(out: Path) -> None:
    """Remove what killed runs left beside `out`: partial copies that no living process holds a lock on."""
    pattern = re.compile(rf"^\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial$")
    for path in out.parent.iterdir():
        if pattern.match(path.name) and path.is_dir() and not path.is_symlink():
            with folder_lock(path) as abandoned:
                if abandoned:
                    shutil.rmtree(path, ignore_errors=True)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")
