"""Repairs of a finished run: put routing back by one of the package's methods, or average with the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from routeguard.protect.modes import QKRestore, Restoration
from routeguard.restoration.averaging import averaged
from routeguard.restoration.in_memory import restored
from routeguard.routes.collection import ROUTING_ROLES, Role

Heads = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Repair:
    """What is done to a tuned model before it is scored.

    Attributes:
        method: how routing is put back, or None for no restore.
        roles: what is put back.
        heads: only so many heads, those that matter most for recall before fine-tuning; None: all.
        average: first move every parameter this share of the way to its start (WiSE-FT), 0 to 1.
    """

    method: Restoration | None = None
    roles: tuple[Role, ...] = ROUTING_ROLES
    heads: int | None = None
    average: float = 0.0

    def settings(self) -> dict[str, Any]:
        """What it does, as JSON; empty for nothing."""
        found: dict[str, Any] = {}
        if self.average:
            found["average"] = self.average
        if self.method is not None:
            found |= {"method": self.method.name, **vars(self.method)}
            if self.roles != ROUTING_ROLES:
                found["roles"] = list(self.roles)
            if self.heads is not None:
                found["heads"] = self.heads
        return found


QK_RESTORE = Repair(QKRestore())
NO_REPAIR = Repair()


@contextmanager
def repaired(
    model: nn.Module, start: Mapping[str, Tensor], repair: Repair, *, heads: Mapping[int, Heads] | None = None
) -> Iterator[None]:
    """The model repaired inside, and as it was tuned again after.

    Args:
        model: the tuned model.
        start: the parameters it started from, by name.
        repair: what to do.
        heads: for each number of heads that a repair may ask for, which they are.

    Raises:
        ValueError: a repair of some heads, of which `heads` does not say which they are.
    """
    chosen = None
    if repair.heads is not None:
        if heads is None or repair.heads not in heads:
            raise ValueError(f"{repair.heads} heads are to be restored, and it is not known which")
        chosen = heads[repair.heads]
    with averaged(model, dict(start), repair.average) if repair.average else nullcontext():
        if repair.method is None:
            yield
        else:
            with restored(model, dict(start), method=repair.method, roles=repair.roles, heads=chosen):
                yield
