"""Writing so that a crash leaves the old file or the new one, and never half of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    with contextlib.suppress(PermissionError):  # a folder cannot be opened on Windows
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Flusher:
    """Has the disk write while a file is still being written, from a thread; leaving the block ends it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._started: list[Future[None]] = []

    def __enter__(self) -> Flusher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Until what has been started is done; nothing can be flushed afterwards."""
        self._pool.shutdown()

    def early(self, path: Path) -> None:
        """Flush what has been written so far, unless the disk is still busy with an earlier call."""
        if not self._started or self._started[-1].done():
            self.finish(path)

    def finish(self, path: Path) -> None:
        """Flush the whole file, to which nothing more will be written."""
        self._started.append(self._pool.submit(sync, path))

    def wait(self) -> None:
        """Until all of it is on the disk. Raises what flushing raised."""
        for started in self._started:
            started.result()


@contextmanager
def written_beside(path: Path, *, exclusive: bool = False) -> Iterator[Path]:
    """A temporary name in the same folder; if the block succeeds, what was written there becomes `path`, for good.

    Args:
        path: the final name; its folder must exist.
        exclusive: raise FileExistsError rather than replace a file that is there. Default: replace.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield beside
        sync(beside)
        if exclusive:
            _publish_new(beside, path)
        else:
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write JSON, atomically."""
    with written_beside(path) as beside:
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _publish_new(beside: Path, path: Path) -> None:
    """Give a file its name only if the name is free."""
    try:
        os.link(beside, path)  # fails, atomically, if the name is taken
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(f"{path} exists") from None
        os.replace(beside, path)
