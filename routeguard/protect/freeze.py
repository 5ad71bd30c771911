"""Freeze: routing rows keep their bits.

Whole parameters lose `requires_grad` (no gradient, no optimizer state, nothing to put back). A row range inside a
trainable parameter gets zero gradient as soon as it is accumulated, so it adds nothing to the clipped norm, and is
copied back after each optimizer step, because weight decay moves even rows without a gradient.

PEFT makes a whole adapter trainable again whenever it is switched off and on, as DPO and GRPO do for the reference
policy at every step. Frozen adapter parameters therefore drop whatever gradient reaches them all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held, held_parameters, trained_adapters
from routeguard.protect.optimizers import inner_optimizer, refuse_row_mixing_optimizer
from routeguard.protect.rows import clear_rows, put_rows, take_rows
from routeguard.routes.collection import Routes
from routeguard.routes.wording import as_printed, first_of
from routeguard.sharding.split import shards_of
from routeguard.sharding.whole import local_tensor


@dataclass
class Frozen:
    """What `freeze` did. `release()` undoes it: gradients flow again, hooks are gone.

    Attributes:
        whole: parameters that no longer require a gradient.
        rows: parameters of which only some rows are held.
        before: held parameters that did not require a gradient before either; `release` leaves them so.
    """

    whole: list[Held]
    rows: list[Held]
    before: list[Held]
    start: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _gradient_hooks: list[Any] = field(default_factory=list, repr=False)
    _step_hooks: list[Any] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        counts = {
            "{} whole tensors": self.whole,
            "rows of {} tensors": self.rows,
            "{} that did not train before": self.before,
        }
        held = ", ".join(text.format(len(members)) for text, members in counts.items() if members)
        return f"freeze holds {held or 'nothing'}"

    _repr_pretty_ = as_printed

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy held rows back after each of the optimizer's steps. Needed only if `rows` is not empty; idempotent.

        Raises ValueError for an optimizer whose update of one row depends on other rows.
        """
        optimizer = inner_optimizer(optimizer)
        if not self.rows or any(known is optimizer for known, _ in self._step_hooks):
            return
        refuse_row_mixing_optimizer(optimizer, [held.name for held in self.rows], "Freeze")
        self._step_hooks.append((optimizer, optimizer.register_step_post_hook(lambda *_: self.put_back())))

    @torch.no_grad()
    def take_start(self) -> None:
        """Take the held rows as they are now for their start. Raises ValueError as `freeze` does.

        `freeze` does it once; call it again after loading other weights into the model.
        """
        refuse_started_adapters(trained_adapters(self.rows))
        for held in self.rows:
            self.start[held.name] = take_rows(held.parameter.detach(), held.rows, held.dim).clone()

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the held rows' start over them (whole parameters need none)."""
        for held in self.rows:
            put_rows(held.parameter, held.rows, self.start[held.name], held.dim)

    def hold_rows(self) -> None:
        """Zero the gradients of held rows and of frozen adapters from now on; idempotent, and again after `detach`."""
        if not self._gradient_hooks:
            self._gradient_hooks += [_hooked(held.whole, _clearing(held)) for held in self.rows]
            self._gradient_hooks += [_hooked(held.whole, _drop) for held in self._adapters()]

    def freeze_again(self) -> None:
        """Freeze adapters that PEFT has made trainable by switching them; without their gradients nothing was lost."""
        for held in self._adapters():
            held.whole.requires_grad_(False)

    def _adapters(self) -> list[Held]:
        return [held for held in self.whole if held.part != "base"]

    def follow(self, held: Sequence[Held]) -> None:
        """Go on with what has come to stand for the parameters: their shards in this process.

        Args:
            held: every held parameter, under the names that it had when it was frozen.
        """
        by_name = {h.name: h for h in held}
        old = [*self.rows, *self._adapters()]
        self.whole, self.rows, self.before = (
            [by_name[h.name] for h in members] for members in (self.whole, self.rows, self.before)
        )
        new = [*self.rows, *self._adapters()]
        if any(h.whole is not before.whole for h, before in zip(new, old, strict=True)):
            for hook in self._gradient_hooks:  # they stay on the same parameters: ZeRO's own hooks come after them
                hook.remove()
            self._gradient_hooks.clear()
        self.take_start()
        self.hold_rows()

    def release(self) -> None:
        """Undo the freeze: whole parameters require gradients again, hooks are removed. The values stay."""
        for held in self.whole:
            held.whole.requires_grad_(True)
        self.detach()

    def detach(self) -> None:
        """Remove every hook; whole parameters stay without gradients."""
        self.detach_optimizers()
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks.clear()

    def detach_optimizers(self) -> None:
        """Remove the hooks on optimizers only."""
        for _, hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()


def freeze(model: nn.Module, routes: Routes) -> Frozen:
    """Hold the routes of a model where they are.

    Whole parameters: `requires_grad_(False)`. Row ranges: the gradient of the rows is zeroed in a post-accumulate
    hook, and `Frozen.attach(optimizer)` copies them back after each step. Nothing of the module's structure or names
    changes.

    Args:
        model: the model, before the optimizer is made (a frozen parameter must not be in it). Under FSDP2 or tensor
            parallelism: after it was split, and before its first forward pass.
        routes: what to hold, from `find_routes(model)`.

    Returns:
        `Frozen`. In a plain loop: `frozen = freeze(model, routes)`, make the optimizer from the parameters that require
        gradients, `frozen.attach(optimizer)`, train, and `frozen.detach()` if the rows' hooks shall go.

    Raises:
        ValueError: rows inside an adapter that is not at zero (PiSSA, OLoRA, trained before): its A moves the rows.
    """
    whole = [h for h in held_parameters(model, routes) if not h.is_shared_factor]
    held: Sequence[Held] = shards_of(whole) or whole
    frozen = Frozen(
        whole=[h for h in held if h.trainable and h.rows is None],
        rows=[h for h in held if h.trainable and h.rows is not None],
        before=[h for h in held if not h.trainable],
    )
    frozen.take_start()
    for h in frozen.whole:
        h.whole.requires_grad_(False)
    frozen.hold_rows()
    return frozen


def _hooked(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """The handle of a post-accumulate hook, which torch registers on trainable parameters only."""
    trainable = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trainable)
    return handle


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _clearing(held: Held) -> Callable[[Tensor], None]:
    def clear(parameter: Tensor) -> None:
        if parameter.grad is not None:
            rows, dim = held.gradient_rows
            clear_rows(local_tensor(parameter.grad), rows, dim)

    return clear


def refuse_started_adapters(moving: Sequence[str]) -> None:
    """Raise ValueError if any B factor, held in some of its rows, is not at zero there."""
    if moving:
        raise ValueError(
            f"{first_of(moving)} is not zero in its held rows: the adapter starts elsewhere "
            "(PiSSA, OLoRA) or has been trained before, so its A, which all rows share, would move the held rows "
            "even while B's rows stand still. Start a fresh adapter (init_lora_weights=True; merge the old one "
            "first), or exclude the module from the adapter (routeguard.lora_config)"
        )
