"""Which modes may run on which training engine: what has not been shown to hold there is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routeguard.protect.held import Held
from routeguard.protect.modes import Anchor, Freeze, LowLR, Protection, QKPro, Restoration


def refuse_unsupported_engine(trainer: Any, protect: Protection, restore: Restoration | None) -> None:
    """Raise ValueError for a mode that the trainer's engine cannot carry, whatever the model."""
    engine = sharding_engine(trainer)
    if engine is None:
        return
    if engine == "FSDP2":
        if isinstance(restore, QKPro):
            raise ValueError(
                "restore='qk_pro' needs whole matrices, which FSDP2 splits over processes; train with restore='qk', or "
                "restore the saved checkpoint: routeguard restore BASE TUNED --out FIXED --method qk_pro"
            )
        return
    if not isinstance(protect, Freeze) or restore is not None:
        raise ValueError(
            f"protect={protect.name!r}{'' if restore is None else ' with restore'} is not supported under {engine} in "
            "this version (parameters are flattened there); use RouteGuard() (freeze) and restore the saved checkpoint "
            "afterwards, or train with FSDP2 (fsdp_version: 2)"
        )
    if engine == "FSDP1" and not trainer.accelerator.state.fsdp_plugin.use_orig_params:
        raise ValueError(
            "FSDP1 without use_orig_params flattens frozen and trainable parameters into one; set "
            "fsdp_config={'use_orig_params': True}, or use FSDP2 (fsdp_version: 2)"
        )


def refuse_split_rows(trainer: Any, protect: Protection, held: Sequence[Held]) -> None:
    """Raise ValueError where an engine that shards parameters cannot carry a mode on this model's tensors."""
    engine = sharding_engine(trainer)
    if engine is None:
        return
    rows = [h.name for h in held if h.rows is not None and h.trainable]
    if rows and (engine != "FSDP2" or isinstance(protect, (LowLR, Anchor))):
        raise ValueError(
            f"{rows[0]} (and {len(rows) - 1} more) holds routing rows beside others, which {protect.name} cannot treat "
            f"apart inside {engine}'s shards; use RouteGuard() (freeze) under FSDP2, or train without sharding"
        )
    adapters = [h.name for h in held if h.part != "base"]
    if adapters and not isinstance(protect, Freeze):
        raise ValueError(
            f"{adapters[0]} (and {len(adapters) - 1} more) is an adapter, whose drift cannot be measured inside "
            f"{engine}'s shards; use RouteGuard() (freeze), adapters beside queries and keys (routeguard.lora_config), "
            "or DDP"
        )


def sharding_engine(trainer: Any) -> str | None:
    """The engine that shards the parameters: "DeepSpeed", "FSDP1", "FSDP2", or None."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        return "DeepSpeed"
    if not getattr(trainer, "is_fsdp_enabled", False):
        return None
    return "FSDP2" if getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) == 2 else "FSDP1"
