"""Which training engines a mode may run on: what has not been shown to hold there is refused."""

from __future__ import annotations

from typing import Any

from routeguard.protect.freeze import Frozen
from routeguard.protect.modes import Freeze, Protection, Restoration


def refuse_unsupported_engine(trainer: Any, protect: Protection, restore: Restoration | None) -> None:
    """Raise ValueError for all but `Freeze` (of whole tensors) on an engine that shards parameters."""
    engine = sharding_engine(trainer)
    if engine is None:
        return
    if not isinstance(protect, Freeze) or restore is not None:
        raise ValueError(
            f"protect={protect.name!r}{'' if restore is None else ' with restore'} is not supported under {engine} in "
            "this version (parameters are sharded there); use RouteGuard() (freeze), and restore the saved checkpoint "
            "afterwards"
        )


def refuse_partial_freeze(trainer: Any, frozen: Frozen) -> None:
    """Raise ValueError where row ranges would have to be held inside sharded parameters."""
    engine = sharding_engine(trainer)
    if engine is not None and frozen.rows:
        raise ValueError(
            f"{frozen.rows[0].name} (and {len(frozen.rows) - 1} more) holds routing rows beside others, which cannot "
            f"be held inside {engine}'s shards in this version; train without sharding, or exclude these tensors from "
            "training"
        )


def sharding_engine(trainer: Any) -> str | None:
    """The engine that shards the parameters: "DeepSpeed", "FSDP", or None."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        return "DeepSpeed"
    return "FSDP" if getattr(trainer, "is_fsdp_enabled", False) else None
