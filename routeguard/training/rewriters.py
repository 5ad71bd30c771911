"""Callbacks that rewrite weights beside the guard: averages (EMA, BEMA) that are swapped in, or saved, at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.freeze import Frozen
from routeguard.protect.held import Held
from routeguard.protect.rows import take_rows
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.whole import is_distributed_tensor
from routeguard.sharding.zero import published
from routeguard.training.stillness import fingerprint

_BEMA = "BEMACallback"


def refuse_bema_beside_frozen(trainer: Any, frozen: Frozen) -> None:
    """Raise ValueError for TRL's BEMACallback where parameters are frozen: it pairs trainable ones with all of them."""
    still = [*frozen.whole, *frozen.before]
    if still and bema_callbacks(trainer):
        raise ValueError(
            f"TRL's {_BEMA} pairs the trainable parameters with all parameters of its copy, one by one, and fails at "
            f"its first update where any is frozen, as {still[0].name} is. Use RouteGuard(protect=Track(), "
            "restore=QKRestore()), which puts the average's queries and keys back too, or leave the callback out"
        )


def refuse_bema_beside_shards(trainer: Any, held: Sequence[Held]) -> None:
    """Raise ValueError for TRL's BEMACallback where the model's own tensors are split: it copies them into a model."""
    split = [h for h in held if is_distributed_tensor(h.parameter) or hasattr(h.parameter, "ds_id")]
    if split and bema_callbacks(trainer):
        raise ValueError(
            f"TRL's {_BEMA} copies the model's tensors into a model of its own, which fails where they are split over "
            f"processes, as {split[0].name} is (FSDP2, ZeRO-3); leave the callback out, or train with DDP or ZeRO-2"
        )


def bema_callbacks(trainer: Any) -> list[Any]:
    """TRL's callbacks that keep an average in a copy of the model and save it at the end of training."""
    callbacks = [] if trainer is None else trainer.callback_handler.callbacks
    return [c for c in callbacks if any(kind.__name__ == _BEMA for kind in type(c).__mro__)]


def averaged_models(trainer: Any) -> list[nn.Module]:
    """The averages that are not saved yet, each a model of its own."""
    models = [getattr(callback, "running_model", None) for callback in bema_callbacks(trainer)]
    return [model for model in models if isinstance(model, nn.Module)]


class Marks:
    """Fingerprints of held rows, taken now, to tell whether somebody writes to them later."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._marks = self._now()

    def changed(self) -> bool:
        """Whether any held row has changed, in any process; every one of them must call it."""
        different = torch.stack([now != then for now, then in zip(self._now(), self._marks, strict=True)])
        return bool(sum_over_processes(different.any().float()))

    def _now(self) -> list[Tensor]:
        rows = [take_rows(h.parameter.detach(), h.rows, h.dim) for h in self._held]
        return [fingerprint(tensor) for tensor in (*rows, *(copy for h in self._held for copy in published(h)))]
