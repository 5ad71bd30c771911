"""Copy files as fast as the platform can: shared blocks (reflink), else inside the kernel, else through memory."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_CHUNK = 32 * 2**20
_FICLONE = 0x40049409  # ioctl of Linux: make one file share the blocks of another
# What a kernel answers where a file system, or a pair of them, cannot do it.
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF}

Advance = Callable[[int], None]


def copy_file(source: Path, target: Path, advance: Advance = lambda count: None) -> str:
    """Copy the content and the permission bits of a file (a link is followed), whole or not at all said to be done.

    Args:
        source: an existing file.
        target: a name that must not exist yet.
        advance: called with the bytes of each piece as it is copied.

    Returns how: "reflink", "in the kernel" or "plain". Raises OSError from the platform (disk full, no permission), and
    ValueError when the source changed while it was copied.
    """
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        before = os.fstat(reader.fileno())
        how = _copy(reader.fileno(), writer.fileno(), before.st_size, advance)
        after = os.fstat(reader.fileno())
        copied = os.fstat(writer.fileno()).st_size
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or copied != before.st_size:
        raise ValueError(f"{source} changed while it was copied; is something still writing to it?")
    shutil.copymode(source, target)
    target.chmod(target.stat().st_mode | 0o200)
    return how


def _copy(reader: int, writer: int, size: int, advance: Advance) -> str:
    if _reflink(reader, writer):
        advance(size)
        return "reflink"
    done = _copy_in_kernel(reader, writer, advance)
    if done == size:
        return "in the kernel"
    _copy_plain(reader, writer, done, advance)
    return "plain"


def _reflink(reader: int, writer: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _copy_in_kernel(reader: int, writer: int, advance: Advance) -> int:
    """Bytes copied before the end of the file, or before the kernel turned out not to support it."""
    done = 0
    if not hasattr(os, "copy_file_range"):  # macOS, Windows
        return done
    while True:
        try:
            count = os.copy_file_range(reader, writer, _CHUNK, done, done)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return done
            raise
        if not count:
            return done
        done += count
        advance(count)


def _copy_plain(reader: int, writer: int, done: int, advance: Advance) -> None:
    os.lseek(reader, done, os.SEEK_SET)
    os.lseek(writer, done, os.SEEK_SET)
    buffer = memoryview(bytearray(4 * 2**20))
    with os.fdopen(os.dup(reader), "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            written = 0
            while written < count:
                written += os.write(writer, buffer[written:count])
            advance(count)
