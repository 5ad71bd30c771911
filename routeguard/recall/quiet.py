"""Run a model in evaluation mode and leave it, and all random states, exactly as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

# On CPUs with bf16 instructions bitsandbytes packs evaluated 4-bit weights anew, for a kernel without gradients.
REPACKS = "support_avx512bf16_for_cpu"
_REMEMBERED = (bool, int, float, str, type(None), torch.Tensor)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards training flags, buffers, counters and random states are put back.

    Buffers, plain numbers and plain tensors on modules matter where a model adapts to the lengths it has seen: dynamic
    rotary scaling keeps its longest one, first as a number and from its first growth on as a tensor. Random states:
    Python's, NumPy's, torch's on the CPU and on every accelerator that holds a parameter.
    """
    devices = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    with ExitStack() as stack:
        stack.enter_context(_python_random())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_modules(model))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _python_random() -> Iterator[None]:
    import numpy

    state, array_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(array_state)


@contextmanager
def _modules(model: nn.Module) -> Iterator[None]:
    kept = [
        (held, {name: _Kept(value) for name, value in held.items() if isinstance(value, _REMEMBERED)})
        for module in model.modules()
        for held in (vars(module), module._buffers)
    ]
    for module in model.modules():
        module.training = False
        if getattr(module, REPACKS, False):
            setattr(module, REPACKS, False)
    try:
        yield
    finally:
        for held, values in kept:
            for name in [n for n, value in held.items() if isinstance(value, _REMEMBERED) and n not in values]:
                del held[name]  # made by a forward pass
            for name, value in values.items():
                held[name] = value.as_it_was()


class _Kept:
    """A number or tensor, with what stood in the tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.copy = value.detach().clone() if isinstance(value, torch.Tensor) else None

    def as_it_was(self) -> Any:
        if self.copy is not None and not torch.equal(self.value, self.copy):
            with torch.no_grad():
                self.value.copy_(self.copy)
        return self.value


def unwrapped(model: Any) -> Any:
    """The model below DDP and torch.compile: probing must not make either of them prepare for other lengths."""
    for _ in range(4):
        model = getattr(model, "_orig_mod", getattr(model, "module", model))
    return model
