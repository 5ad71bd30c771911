"""A patch: new bytes for some rows of one tensor on disk, produced only when they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from routeguard.routes.collection import Rows, count_rows
from routeguard.storage.durable import Flusher
from routeguard.storage.header import StoredTensor
from routeguard.storage.row_bytes import row_chunks, write_rows


@dataclass(frozen=True)
class Patch:
    """Rows of a tensor in TUNED, and what is to stand there.

    Attributes:
        tensor, rows, dim: where.
        values: gives the new bytes in chunks, in row-major order, in the tensor's dtype.
    """

    tensor: StoredTensor
    rows: Rows | None
    dim: int
    values: Callable[[], Iterable[bytes]]

    def current(self) -> Iterator[bytes]:
        """The bytes that stand there now."""
        return row_chunks(self.tensor, self.rows, self.dim)

    @property
    def num_bytes(self) -> int:
        if self.rows is None:
            return self.tensor.num_bytes
        return self.tensor.num_bytes // self.tensor.shape[self.dim] * count_rows(self.rows)


def apply_patches(patches: Sequence[Patch], *, folder: Path | None = None) -> None:
    """Write every patch over its rows and to the disk, in `folder` if given (the same file names), else in place.

    Raises OSError from the platform. The caller cleans up or rolls back when this fails.
    """
    with Flusher() as flusher:
        for patch in patches:
            tensor = patch.tensor if folder is None else replace(patch.tensor, file=folder / patch.tensor.file.name)
            with tensor.file.open("r+b") as stream:
                write_rows(stream, tensor, patch.rows, patch.dim, patch.values())
            flusher.early(tensor.file)
        for file in patched_files(patches):
            flusher.finish(file if folder is None else folder / file.name)
        flusher.wait()


def patched_files(patches: Iterable[Patch]) -> list[Path]:
    """The files that some patches touch, once each."""
    return list(dict.fromkeys(patch.tensor.file for patch in patches))
