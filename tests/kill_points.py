"""Kill a restore at every line of the code that writes, and look at what is left. Run as a script: no torch in here.

    python -m tests.kill_points {copy | in-place | undo} FOLDER [STRIDE]

FOLDER holds `base` and `tuned`. Each child process is killed (SIGKILL) when it reaches the n-th line executed in the
modules that write; the parent then checks what is there. Prints how many points were tried and what the outcomes were.
"""

from __future__ import annotations

import collections
import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from routeguard.checkpoint.in_place import undo_path, undo_restore
from routeguard.checkpoint.restore import restore_checkpoint

WRITERS = (
    "in_place.py",
    "new_folder.py",
    "provenance.py",
    "patch.py",
    "copying.py",
    "durable.py",
    "row_bytes.py",
    "writer.py",
)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(folder).items() if "/" not in name}


def run_until(action: Callable[[], object], line: int) -> bool:
    """Run in a child that is killed at the n-th line of a writer. True if it was killed, False if it ended before."""
    child = os.fork()
    if child == 0:
        left = line

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if os.path.basename(frame.f_code.co_filename) not in WRITERS:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        status = 1
        try:
            threading.settrace(trace)  # the copy runs in a thread
            sys.settrace(trace)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the restore failed by itself"
    return False


def copy_points(folder: Path, stride: int) -> collections.Counter[str]:
    """There is no OUT, or a whole one; TUNED is never touched; the next run cleans up and succeeds."""
    base, tuned, out = folder / "base", folder / "tuned", folder / "out"
    before = contents(tuned)
    restore_checkpoint(base, tuned, out=folder / "whole")
    whole = weights(folder / "whole")
    outcomes: collections.Counter[str] = collections.Counter()
    line = 1
    while run_until(lambda: restore_checkpoint(base, tuned, out=out), line):
        assert contents(tuned) == before, f"TUNED changed (killed at line {line})"
        if out.exists():
            assert weights(out) == whole, f"half an OUT (killed at line {line})"
            assert (out / "routeguard" / "provenance.json").is_file()
            outcomes["whole"] += 1
            shutil.rmtree(out)
        else:
            outcomes["absent"] += 1
        line += stride
    assert weights(out) == whole
    left_over = [path.name for path in folder.iterdir() if path.name.startswith(".out.")]
    assert not left_over, f"the last run did not remove what the killed ones left: {left_over}"
    return outcomes


def in_place_points(folder: Path, stride: int) -> collections.Counter[str]:
    """Untouched, or undone to the last byte, or restored; and a second restore says what is going on."""
    base, tuned = folder / "base", folder / "tuned"
    before = weights(tuned)
    restore_checkpoint(base, tuned, out=folder / "whole")
    whole = weights(folder / "whole")
    outcomes: collections.Counter[str] = collections.Counter()
    work = folder / "work"
    line = 1
    while True:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tuned, work)
        killed = run_until(lambda: restore_checkpoint(base, work, in_place=True), line)
        if undo_path(work).exists():
            outcomes[
                "restored" if weights(work) == whole else "in the middle" if weights(work) != before else "undo only"
            ] += 1
            refused = ""
            try:
                restore_checkpoint(base, work, in_place=True)
            except ValueError as error:
                refused = str(error)
            assert "routeguard undo" in refused, f"a second restore was not refused (killed at line {line})"
            undo_restore(work)
        else:
            outcomes["untouched"] += 1
        assert weights(work) == before, f"old bytes lost (killed at line {line})"
        if not killed:
            return outcomes
        line += stride


def undo_points(folder: Path, stride: int) -> collections.Counter[str]:
    """An undo that is killed can be run again, and then every old byte is back."""
    base, tuned = folder / "base", folder / "tuned"
    before = weights(tuned)
    outcomes: collections.Counter[str] = collections.Counter()
    work = folder / "work"
    line = 1
    while True:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tuned, work)
        restore_checkpoint(base, work, in_place=True)
        assert weights(work) != before
        killed = run_until(lambda: undo_restore(work), line)
        if undo_path(work).exists():
            outcomes["undone at the second try"] += 1
            undo_restore(work)
        else:
            outcomes["undone"] += 1
        assert weights(work) == before, f"old bytes lost (killed at line {line})"
        if not killed:
            return outcomes
        line += stride


if __name__ == "__main__":
    points = {"copy": copy_points, "in-place": in_place_points, "undo": undo_points}[sys.argv[1]]
    counts = points(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    assert "torch" not in sys.modules
    print(sum(counts.values()), dict(counts))
