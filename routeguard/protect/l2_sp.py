"""L2-SP: after each optimizer step, pull every trained weight back towards its start, scaled by the learning rate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.adapter_start import left_free
from routeguard.protect.groups import check_pull_rate, pull_share
from routeguard.protect.modes import L2SP
from routeguard.protect.optimizers import inner_optimizer, refuse_rate_free_optimizer
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.names import canonical_name
from routeguard.routes.wording import as_printed
from routeguard.sharding.split import is_split


class WholePull:
    """The pull `p ← p + lr · strength · (start − p)` on the parameters of an optimizer, after each of its steps.

    Each group's own learning rate is used. Weight decay of every group is 0 meanwhile, since it would pull towards zero
    instead; `remove` gives it back.

    Args:
        optimizer: a torch optimizer, or one that accelerate has prepared.
        starts: the start of each of its parameters, on the parameter's device and in its dtype (kept, not copied).
        strength: positive, and at most `1 / lr`.
        free: its trainable parameters that are not pulled. Default: none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        starts: Mapping[nn.Parameter, Tensor],
        strength: float,
        free: Collection[nn.Parameter] = (),
    ) -> None:
        optimizer = inner_optimizer(optimizer)
        refuse_rate_free_optimizer(optimizer, L2SP.__name__)
        check_pull_rate(optimizer.param_groups, L2SP.__name__, strength)
        self.strength = strength
        self._optimizer = optimizer
        self._starts = starts
        self._free = frozenset(free)
        missing = len(self._without_start())
        if missing:
            raise ValueError(
                f"the optimizer holds {missing} parameters that the model does not have; L2SP pulls the model's "
                "trained weights: make the optimizer from model.parameters()"
            )
        self._decay = [group.get("weight_decay") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if group.get("weight_decay"):
                group["weight_decay"] = 0.0
        self._hook: Any = optimizer.register_step_post_hook(lambda *_: self.pull())

    def __str__(self) -> str:
        kind = type(self._optimizer).__name__
        return (
            f"{L2SP.name}: {self.describe_members()} in {kind}, pulled to their start with strength {self.strength:g}"
        )

    _repr_pretty_ = as_printed

    def describe_members(self) -> str:
        """How much is pulled: "57 tensors, 244,544 parameters"."""
        members = f"{len(self._starts)} tensors, {sum(start.numel() for start in self._starts.values()):,} parameters"
        if self._free:
            members += f" (not {len(self._free)} factors of adapters whose other factor, at zero, is pulled)"
        return members

    @property
    def start_bytes(self) -> int:
        """Bytes of the start that is kept on the device."""
        return sum(start.numel() * start.element_size() for start in self._starts.values())

    @torch.no_grad()
    def pull(self) -> None:
        """One pull at the groups' current learning rates.

        Raises ValueError, and pulls nothing, if one of them would overshoot, or if more is trained than has a start.
        """
        groups = self._optimizer.param_groups
        added = self._without_start()
        if added:
            shapes = ", ".join(str(list(p.shape)) for p in added[:3])
            raise ValueError(
                f"the optimizer has come to train {len(added)} parameters (shapes {shapes}) that L2SP knows no start "
                "of: they were added to it, or unfrozen, since. Call remove() on the pull and make it again after that"
            )
        shares = [pull_share(float(group["lr"]), L2SP.__name__, self.strength) for group in groups]
        for group, share in zip(groups, shares, strict=True):
            now = [parameter for parameter in group["params"] if parameter in self._starts]
            if now:
                starts = [self._starts[parameter] for parameter in now]
                torch._foreach_lerp_(now, starts, share)

    def _without_start(self) -> list[nn.Parameter]:
        """What the optimizer trains and the pull knows nothing of; what is frozen does not move and needs no start."""
        params = (p for group in self._optimizer.param_groups for p in group["params"])
        return [p for p in params if p.requires_grad and p not in self._starts and p not in self._free]

    def remove(self) -> None:
        """No further pulls; weight decay is what it was."""
        self._hook.remove()
        for group, decay in zip(self._optimizer.param_groups, self._decay, strict=False):  # others were added since
            if decay:
                group["weight_decay"] = decay


def l2_sp(optimizer: torch.optim.Optimizer, model: nn.Module, *, rates: float, total: float = 0.9) -> WholePull:
    """`L2SP` for a plain loop: pull every trained weight towards its present value after each step of the optimizer.

    Costs one copy of the trained weights. What a LoRA adapter adds is pulled to its start: through one factor if that
    is zero now, which is exact (derived), else through both.

        l2_sp(optimizer, model, rates=sum(schedule(step) for step in range(num_steps)))

    Args:
        optimizer: over parameters of the model.
        model: on its final device and in its final dtype. Under DDP, before or after it is wrapped.
        rates: the learning rates of all planned steps, added up; of several groups, those of the fastest.
        total: as in `L2SP`. Default 0.9.

    Raises:
        ValueError: split or 16-bit weights; parameters that are not the model's; a total or rates that are not
            positive, or a pull of more than the whole way in one step.
    """
    strength = L2SP(total).strength(rates)
    refuse_unpulled(model)
    return pull_to(optimizer, model, {name: p.detach().clone() for name, p in trained_weights(model).items()}, strength)


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """What training moves, by canonical name."""
    return {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def pull_to(
    optimizer: torch.optim.Optimizer, model: nn.Module, starts: Mapping[str, Tensor], strength: float
) -> WholePull:
    """The pull of a model's trained weights to `starts`, which has all of them by canonical name."""
    trained, free = trained_weights(model), left_free(starts)
    pulled = {p: starts[name] for name, p in trained.items() if name not in free}
    return WholePull(optimizer, pulled, strength, [trained[name] for name in free])


def refuse_unpulled(model: nn.Module) -> None:
    """Raise ValueError for a model whose weights a pull would miss or not move."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model is trainable, so there is nothing that L2SP could pull")
    for name, parameter in trained:
        if is_split(parameter):
            raise ValueError(
                f"L2SP is not supported where parameters are split over processes ({name}); train with DDP, or with "
                "RouteGuard(protect='track') and average what was saved: routeguard average BASE TUNED --out FIXED"
            )
        if is_quantised(parameter) or parameter.dtype.itemsize < 4:
            raise ValueError(
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}: a pull of lr · strength of the way is below "
                "the resolution of 16 bits and would be lost. Load the model in float32 and train with bf16=True "
                "(autocast; PEFT makes adapters in float32 by itself), or use Average() at the end, which rounds at "
                "random"
            )
