"""Run a model for inspection and leave no trace: what is changed for the run is put back in `finally`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_WINDOW_NAME = re.compile(r"sliding|window|attention_chunk|local_attention")
_NOT_A_WINDOW = re.compile(r"layers|pattern|num_|mamba|conv|keep_window|period|type|^_")


def config_of(model: nn.Module) -> Any:
    """The text configuration of `model`, looking through wrappers, or None for a module without one."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and not isinstance(config, dict):
            get_text_config = getattr(config, "get_text_config", None)
            return get_text_config() if callable(get_text_config) else config
    return None


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration object that a module of `model` reads, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "__dict__"):
            return
        if not hasattr(config, "model_type"):
            return
        found[id(config)] = config
        for value in list(vars(config).values()):
            add(value)

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def windows_of(config: Any) -> dict[str, int]:
    """Attention windows and chunks, in tokens, by the name of the field of `config` that holds them."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and value > 0
        and _WINDOW_NAME.search(name)
        and not _NOT_A_WINDOW.search(name)
    }


@contextmanager
def _attributes(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set instance attributes behind any property or validator, and put the old ones back."""
    namespace = vars(owner)
    old = {name: namespace[name] for name in values}
    namespace.update(values)
    try:
        yield
    finally:
        namespace.update(old)


def _substitute(parameter: Tensor, *, fill_zeros: bool, generator: torch.Generator) -> nn.Parameter:
    """A leaf that shares the memory of `parameter`; a copy with small noise where whole rows or columns are zero."""
    data = parameter.detach()
    if fill_zeros and data.numel():
        zero = data == 0
        dims = range(data.dim())
        if any(bool(zero.all(dim=[d for d in dims if d != dim] or None).any()) for dim in dims) or (
            not dims and bool(zero)
        ):
            kept = data[~zero].float()
            scale = float(kept.std()) if kept.numel() > 1 and float(kept.std()) > 0 else 0.05
            noise = torch.randn(data.shape, generator=generator) * scale
            data = torch.where(zero, noise.to(data), data)
    return nn.Parameter(data, requires_grad=True)


@contextmanager
def substituted_parameters(model: nn.Module, *, seed: int = 0) -> Iterator[dict[str, nn.Parameter]]:
    """Put differentiable stand-ins in the place of the floating-point parameters of `model`.

    The originals are never written to: their values, flags, gradients and hooks stay as they are. Stand-ins share their
    memory, except where whole rows or columns are zero (fresh LoRA factors, zero biases and gains): those get small
    noise, because a zero factor hides what depends on it. Yields the stand-ins by their name in `named_parameters()`.
    """
    generator = torch.Generator().manual_seed(seed)
    stand_ins: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    slots: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                if id(parameter) not in stand_ins:
                    fill = id(parameter) not in embeddings
                    stand_ins[id(parameter)] = _substitute(parameter, fill_zeros=fill, generator=generator)
                slots.append((module._parameters, name, parameter))
        for namespace, name, parameter in slots:
            namespace[name] = stand_ins[id(parameter)]
        yield {names[key]: value for key, value in stand_ins.items()}
    finally:
        for namespace, name, parameter in slots:
            namespace[name] = parameter


@contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Put buffers back that a forward pass replaces or updates."""
    saved = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for namespace, name, buffer, copy in saved:
                namespace[name] = buffer
                if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                    buffer.copy_(copy)


@contextmanager
def sandbox(
    model: nn.Module, *, seed: int = 0, max_window_tokens: int | None = None
) -> Iterator[dict[str, nn.Parameter]]:
    """Prepare `model` for inspection: eager attention, evaluation mode, uncompiled, stand-in parameters.

    Args:
        model: any module; every change is undone on the way out, also after an exception.
        seed: for the noise in stand-ins and for whatever the forward pass draws.
        max_window_tokens: attention windows and chunks longer than this are shortened to it, in the configuration and
            in the modules that copied the number. None leaves them.

    Yields:
        The stand-in parameters of `substituted_parameters`.
    """
    devices = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.manual_seed(seed)
        stack.enter_context(_buffers(model))
        shortened: set[tuple[str, int]] = set()
        for config in _configs(model):
            if "_attn_implementation_internal" in vars(config):
                stack.enter_context(_attributes(config, {"_attn_implementation_internal": "eager"}))
            if max_window_tokens is not None:
                long = {name: size for name, size in windows_of(config).items() if size > max_window_tokens}
                shortened |= set(long.items())
                stack.enter_context(_attributes(config, dict.fromkeys(long, max_window_tokens)))
        sizes = {size for _, size in shortened}
        for module in model.modules():
            changes: dict[str, Any] = {"training": False} if "training" in vars(module) else {}
            for name, value in vars(module).items():
                if type(value) is int and value in sizes and _WINDOW_NAME.search(name):
                    changes[name] = max_window_tokens
            stack.enter_context(_attributes(module, changes))
        yield stack.enter_context(substituted_parameters(model, seed=seed))
