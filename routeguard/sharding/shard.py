"""What one process has of a held parameter that an engine splits over processes.

A `Shard` is a `Held` whose tensor and rows are the local ones, so that whatever works on held rows (freezing, pulling,
measuring, putting back) works on a shard as it stands, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held
from routeguard.protect.rows import put_rows, take_rows
from routeguard.routes.collection import Route, Rows


@dataclass(frozen=True, eq=False)
class Shard(Held):
    """The local part of a held parameter. `parameter` is a plain tensor in the shard's memory, `rows` lie in it.

    Attributes:
        split: the parameter as the model has it.
        shape: of the whole parameter.
        whole_rows, whole_dim: the held rows in the whole parameter.
        copies: how many processes have these very entries; sums over all processes count each only once.
        cut: the local part of any tensor that has the whole parameter's shape.
        whole_gradient: whether gradients come whole (ZeRO), and not split like the parameter (FSDP2).
    """

    split: nn.Parameter
    shape: tuple[int, ...]
    whole_rows: Rows | None
    whole_dim: int
    copies: int
    cut: Callable[[Tensor], Tensor]
    whole_gradient: bool

    @property
    def whole(self) -> nn.Parameter:
        return self.split

    @property
    def gradient_rows(self) -> tuple[Rows | None, int]:
        return (self.whole_rows, self.whole_dim) if self.whole_gradient else (self.rows, self.dim)

    @property
    def share(self) -> float:
        return 1 / self.copies

    def start_of(self, values: Tensor) -> Tensor:
        """The local part of the held rows' start; `values` are all of them, concatenated along their dimension."""
        if self.whole_rows is None:
            return self.cut(values)
        spread = torch.zeros(self.shape, dtype=values.dtype, device=values.device)
        put_rows(spread, self.whole_rows, values, self.whole_dim)
        return take_rows(self.cut(spread), self.rows, self.dim).clone()


def make_shard(
    held: Held,
    local: Tensor,
    *,
    shape: Sequence[int],
    dim: int,
    copies: int,
    cut: Callable[[Tensor], Tensor],
    whole_gradient: bool,
) -> Shard:
    """The shard of a held parameter.

    Args:
        held: the parameter and its held rows as a single process would have them.
        local: a tensor in the shard's memory.
        shape: of the whole parameter.
        dim: along which dimension of `local` its rows lie.
        copies, cut, whole_gradient: as in `Shard`.

    Raises ValueError where the engine splits the inside of rows, so that no local rows are the held ones.
    """
    routed = held.routes if held.part != "lora_A" else ()  # the routed weight's rows are not rows of A
    covered = {rows: _local_rows(held, rows, shape, dim, cut) for rows in {held.rows, *(r.rows for r in routed)}}

    def route_here(route: Route) -> Route:
        return replace(route, rows=covered[route.rows], dim=dim, shape=tuple(local.shape))

    return Shard(
        name=held.name,
        parameter=local,  # type: ignore[arg-type]
        rows=covered[held.rows],
        dim=dim,
        part=held.part,
        routes=tuple(route_here(route) for route in routed) or held.routes,
        split=held.parameter,
        shape=tuple(shape),
        whole_rows=held.rows,
        whole_dim=held.dim,
        copies=copies,
        cut=cut,
        whole_gradient=whole_gradient,
    )


def _local_rows(
    held: Held, rows: Rows | None, shape: Sequence[int], dim: int, cut: Callable[[Tensor], Tensor]
) -> Rows | None:
    """Which rows of the local part are these rows of the whole: () if none."""
    if rows is None:
        return None
    mask = torch.zeros(tuple(shape), dtype=torch.bool)
    for start, stop in rows:
        mask.narrow(held.dim, start, stop - start).fill_(True)
    here = cut(mask)
    if not here.numel():
        return ()
    lines = here.movedim(dim, 0).reshape(here.shape[dim], -1)
    inside = lines.all(1)
    if not torch.equal(inside, lines.any(1)):
        raise ValueError(f"{held.name} is split inside its rows, so that no rows of this process are the held ones")
    return ranges_of(inside)


def ranges_of(mask: Tensor) -> Rows:
    """The runs of True in a 1-d mask, as (start, stop)."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, stops, strict=True))
