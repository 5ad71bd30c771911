"""Take, put and clear row ranges of a tensor along a dimension. `rows` None means the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.routes.collection import Rows
from routeguard.routes.layouts import complement


def take_rows(tensor: Tensor, rows: Rows | None, dim: int = 0) -> Tensor:
    """The rows, concatenated in order along `dim`. A view for None or a single range, else a copy."""
    if rows is None:
        return tensor
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in rows]
    if not pieces:  # a shard without any of the rows
        return tensor.narrow(dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def put_rows(tensor: Tensor, rows: Rows | None, values: Tensor, dim: int = 0) -> None:
    """Write `values` (as `take_rows` gives them) over the rows, in place."""
    if rows is None:
        tensor.copy_(values)
        return
    offset = 0
    for start, stop in rows:
        tensor.narrow(dim, start, stop - start).copy_(values.narrow(dim, offset, stop - start))
        offset += stop - start


def clear_rows(tensor: Tensor, rows: Rows | None, dim: int = 0) -> None:
    """Set the rows to zero, in place."""
    if rows is None:
        tensor.zero_()
        return
    for start, stop in rows:
        tensor.narrow(dim, start, stop - start).zero_()


def free_rows(rows: Rows, total: int) -> Rows:
    """The rows of a dimension of size `total` that are not in `rows`."""
    return complement(rows, total)
