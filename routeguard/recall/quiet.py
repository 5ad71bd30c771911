"""Run a model in evaluation mode and leave it, and all random states, exactly as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards training flags, buffers, counters and random states are put back.

    Buffers and plain numbers on modules matter where a model adapts to the length it has last seen (dynamic rotary
    scaling). Random states: Python's, NumPy's, torch's on the CPU and on every accelerator that holds a parameter.
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
    plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
    buffers: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module in model.modules():
        namespace = vars(module)
        plain.append((namespace, {name: value for name, value in namespace.items() if isinstance(value, _PLAIN)}))
        for name, buffer in module._buffers.items():
            buffers.append((module._buffers, name, buffer, None if buffer is None else buffer.detach().clone()))
    for module in model.modules():
        module.training = False
    try:
        yield
    finally:
        for namespace, values in plain:
            for name, value in values.items():
                if namespace.get(name) is not value:
                    namespace[name] = value
        for holder, name, buffer, copy in buffers:
            holder[name] = buffer
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)
