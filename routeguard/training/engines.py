"""Which modes may run on which training engine: what has not been shown to hold there is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from routeguard.protect.held import Held
from routeguard.protect.modes import L2SP, Anchor, AtEnd, Average, Freeze, LowLR, Protection, QKPro
from routeguard.routes.wording import first_of
from routeguard.sharding.whole import is_distributed_tensor
from routeguard.sharding.zero import zero_optimizer


@dataclass(frozen=True)
class Engine:
    """What splits a model's parameters over processes, and what of its settings decides which modes it carries.

    Attributes:
        name: "tensor parallelism" is the one that transformers does itself.
        own_blocks: names of the blocks in a DeepSpeed config.
        use_orig_params: FSDP1's setting of that name.
    """

    name: Literal["DeepSpeed", "FSDP1", "FSDP2", "tensor parallelism"]
    own_blocks: frozenset[str] = frozenset()
    use_orig_params: bool = True


def engine_of(trainer: Any) -> Engine | None:
    """What splits the parameters of a Trainer's model; None for one device, and for DDP."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        config = getattr(plugin, "deepspeed_config", {})
        return Engine("DeepSpeed", own_blocks=frozenset(config))
    if not getattr(trainer, "is_fsdp_enabled", False):
        model = getattr(trainer, "model", None)
        split = model is not None and any(is_distributed_tensor(parameter) for parameter in model.parameters())
        return Engine("tensor parallelism") if split else None
    plugin = trainer.accelerator.state.fsdp_plugin
    if getattr(plugin, "fsdp_version", 1) == 2:
        return Engine("FSDP2")
    return Engine("FSDP1", use_orig_params=bool(getattr(plugin, "use_orig_params", True)))


def refuse_unsupported_engine(engine: Engine | None, protect: Protection, restore: AtEnd | None) -> None:
    """Raise ValueError for a mode that an engine cannot carry, whatever the model."""
    if engine is None:
        return
    if isinstance(restore, QKPro):
        raise ValueError(
            f"restore='qk_pro' needs whole matrices, which {engine.name} splits over processes; train with "
            "restore='qk', or restore the saved checkpoint: routeguard restore BASE TUNED --out FIXED --method qk_pro"
        )
    if isinstance(restore, Average):
        raise ValueError(
            f"restore='average' needs whole weights, which {engine.name} splits over processes; train with "
            "RouteGuard(protect='track') and average what was saved: routeguard average BASE TUNED --out FIXED "
            f"--alpha {restore.alpha:g}"
        )
    if isinstance(protect, L2SP):
        raise ValueError(
            f"protect='l2_sp' pulls whole weights, which {engine.name} splits over processes; train with DDP, or with "
            "RouteGuard(protect='track') and average what was saved: routeguard average BASE TUNED --out FIXED"
        )
    if engine.name == "DeepSpeed":
        _refuse_own_blocks(engine, protect)
    if engine.name != "FSDP1":
        return
    if not isinstance(protect, Freeze) or restore is not None:
        raise ValueError(
            f"protect={protect.name!r}{'' if restore is None else ' with restore'} is not supported under FSDP1 "
            "(parameters are flattened there); use RouteGuard() (freeze) and restore the saved checkpoint afterwards, "
            "or train with FSDP2 (fsdp_version: 2)"
        )
    if not engine.use_orig_params:
        raise ValueError(
            "FSDP1 without use_orig_params flattens frozen and trainable parameters into one; set "
            "fsdp_config={'use_orig_params': True}, or use FSDP2 (fsdp_version: 2)"
        )


def _refuse_own_blocks(engine: Engine, protect: Protection) -> None:
    """Raise ValueError for blocks of a DeepSpeed config that would take routing's groups or rates away."""
    if isinstance(protect, (LowLR, Anchor)) and "optimizer" in engine.own_blocks:
        raise ValueError(
            f"the DeepSpeed config has its own 'optimizer' block, so DeepSpeed makes the optimizer and {protect.name} "
            "cannot give routing a group of its own; remove the block (TrainingArguments then choose the optimizer)"
        )
    if isinstance(protect, LowLR) and "scheduler" in engine.own_blocks:
        raise ValueError(
            "the DeepSpeed config has its own 'scheduler' block, which sets the rate of every group alike and would "
            "undo LowLR; remove the block (TrainingArguments then choose the schedule)"
        )


def refuse_split_rows(engine: Engine | None, protect: Protection, held: Sequence[Held]) -> None:
    """Raise ValueError where an engine that shards parameters cannot carry a mode on this model's tensors."""
    if engine is None:
        return
    rows = [h.name for h in held if h.rows is not None and h.trainable]
    if rows and (engine.name == "FSDP1" or isinstance(protect, (LowLR, Anchor))):
        raise ValueError(
            f"{first_of(rows)} holds routing rows beside others, which {protect.name} cannot treat "
            f"apart inside {engine.name}'s shards; use RouteGuard() (freeze) under FSDP2 or DeepSpeed, or train "
            "without sharding"
        )
    adapters = [h.name for h in held if h.part != "base"]
    if adapters and not isinstance(protect, Freeze):
        raise ValueError(
            f"{first_of(adapters)} is an adapter, whose drift cannot be measured inside "
            f"{engine.name}'s shards; use RouteGuard() (freeze), adapters beside queries and keys "
            "(routeguard.lora_config), or DDP"
        )


def refuse_scheduled_optimizer(trainer: Any, protect: Protection) -> None:
    """Raise ValueError for a Trainer that was given an optimizer and its schedule, by a mode that splits the groups."""
    if isinstance(protect, (LowLR, Anchor)) and trainer.lr_scheduler is not None:
        raise ValueError(
            f"the Trainer was given an optimizer and a scheduler, whose groups {protect.name} can no longer split; "
            "give it neither (optimizer_cls_and_kwargs or args choose them), or build the groups with "
            "routeguard.param_groups"
        )


def refuse_probing(engine: Engine | None) -> None:
    """Raise ValueError for an engine under which `RecallProbe` cannot measure."""
    if engine is not None:
        raise ValueError(
            f"RecallProbe is not supported under {engine.name} in this version: parameters are sharded there"
        )


def refuse_unread_masters(trainer: Any, optimizer: Any) -> None:
    """Raise ValueError where DeepSpeed has masters of the parameters that are not in the optimizer of this run."""
    if zero_optimizer(optimizer) is not None:
        return
    if zero_optimizer(getattr(getattr(trainer, "model_wrapped", None), "optimizer", None)) is not None:
        raise ValueError(
            "a second train() of one Trainer under DeepSpeed: its engine still has the first one's optimizer, and "
            "transformers cannot step it again. Make a new Trainer, with a model of its own, for the second training"
        )
    refuse_masters_without_zero()


def refuse_masters_without_zero() -> None:
    """Raise ValueError: 16-bit DeepSpeed of stage 0, whose float32 masters are nowhere that routeguard reads."""
    raise ValueError(
        "DeepSpeed keeps float32 masters here without ZeRO (stage 0 in 16 bits), which routeguard does not read; use "
        "ZeRO stage 1, 2 or 3"
    )
