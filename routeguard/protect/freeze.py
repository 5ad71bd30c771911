"""Freeze: routing rows keep their bits.

Whole parameters lose `requires_grad` (no gradient, no optimizer state, nothing to put back). A row range inside a
trainable parameter gets zero gradient as soon as it is accumulated, so it adds nothing to the clipped norm, and is
copied back after each optimizer step, because weight decay moves even rows without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held, held_parameters, starts_at_zero
from routeguard.protect.optimizers import refuse_row_mixing_optimizer
from routeguard.protect.rows import clear_rows, put_rows, take_rows
from routeguard.routes.collection import Routes


@dataclass
class Frozen:
    """What `freeze` did. `release()` undoes it: gradients flow again, hooks are gone.

    Attributes:
        whole: parameters that no longer require a gradient.
        rows: parameters of which only some rows are held.
    """

    whole: list[Held]
    rows: list[Held]
    start: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _gradient_hooks: list[Any] = field(default_factory=list, repr=False)
    _step_hooks: list[Any] = field(default_factory=list, repr=False)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy held rows back after each of the optimizer's steps. Needed only if `rows` is not empty; idempotent.

        Raises ValueError for an optimizer whose update of one row depends on other rows.
        """
        if not self.rows or any(known is optimizer for known, _ in self._step_hooks):
            return
        refuse_row_mixing_optimizer(optimizer, [held.name for held in self.rows], "Freeze")
        self._step_hooks.append((optimizer, optimizer.register_step_post_hook(lambda *_: self.put_back())))

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy the held rows' start over them (whole parameters need none)."""
        for held in self.rows:
            put_rows(held.parameter, held.rows, self.start[held.name], held.dim)

    def release(self) -> None:
        """Undo the freeze: whole parameters require gradients again, hooks are removed. The values stay."""
        for held in self.whole:
            held.parameter.requires_grad_(True)
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
        model: the model, before the optimizer is made (a frozen parameter must not be in it).
        routes: what to hold, from `find_routes(model)`.

    Returns:
        `Frozen`. In a plain loop: `frozen = freeze(model, routes)`, make the optimizer from the parameters that require
        gradients, `frozen.attach(optimizer)`, train, and `frozen.detach()` if the rows' hooks shall go.

    Raises:
        ValueError: rows inside an adapter whose start is not zero (PiSSA, OLoRA): its A moves the rows.
    """
    whole: list[Held] = []
    rows: list[Held] = []
    for held in held_parameters(model, routes):
        if not held.trainable:
            continue
        if held.rows is None:
            if not (held.part == "lora_A" and _is_shared_factor(held, routes)):
                whole.append(held)
        else:
            _refuse_moving_start(model, held)
            rows.append(held)
    for held in whole:
        held.parameter.requires_grad_(False)
    frozen = Frozen(whole, rows)
    for held in rows:
        frozen.start[held.name] = take_rows(held.parameter.detach(), held.rows, held.dim).clone()
        frozen._gradient_hooks.append(held.parameter.register_post_accumulate_grad_hook(_clearing(held)))
    return frozen


def _clearing(held: Held) -> Callable[[Tensor], None]:
    def clear(parameter: Tensor) -> None:
        if parameter.grad is not None:
            clear_rows(parameter.grad, held.rows, held.dim)

    return clear


def _is_shared_factor(held: Held, routes: Routes) -> bool:
    """LoRA's A feeds every row of the module; it stays free when only some of those rows are held."""
    return routes.rows_of(held.routes[0].parameter) is not None


def _refuse_moving_start(model: nn.Module, held: Held) -> None:
    if held.part != "lora_B":
        return
    adapter = held.name.split("lora_B.")[1].split(".")[0]
    if not starts_at_zero(model, adapter):
        raise ValueError(
            f"{held.name}: adapter {adapter!r} starts with a non-zero B (PiSSA, OLoRA or the like), so its A, which "
            "all rows share, would move the held rows even while B's rows stand still. Initialise it with "
            "init_lora_weights=True, or exclude the module from the adapter (routeguard.lora_config)"
        )
