"""A lock on a folder, which ends with the process that holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[bool | None]:
    """Hold a lock on a folder while the block runs.

    Gives True when it is held, False when another process holds it (without `wait`), and None where folders cannot be
    locked (Windows, some network file systems), where nothing is held.
    """
    try:
        import fcntl
    except ImportError:
        yield None
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        held: bool | None = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except OSError:
            held = None
        yield held
    finally:
        os.close(handle)
