"""The tokens that a probe runs a model on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.routes._sandbox import config_of, windows_of

SLACK_TOKENS = 4
_MAX_PROBE_TOKENS = 256


def probe_inputs(
    model: nn.Module,
    *,
    input_ids: Tensor | None,
    num_tokens: int,
    seed: int,
    extra_inputs: Mapping[str, Any] | None,
    notes: list[str],
) -> dict[str, Any]:
    """Forward arguments: `input_ids` if given, else random [1, tokens] that outgrow the configured windows.

    Remarks go to `notes`. Raises ValueError for less than 8 tokens and for a model without a vocabulary to draw from.
    """
    config = config_of(model)
    windows = {} if config is None else windows_of(config)
    if input_ids is None:
        input_ids = _random_ids(model, _choose_length(model, config, num_tokens, windows), seed)
    if input_ids.dim() < 2 or input_ids.shape[1] < 8:
        raise ValueError(
            f"a probe of shape {tuple(input_ids.shape)} cannot tell a window from full attention; use [1, tokens] with "
            "at least 8 tokens (num_tokens=24 is the default)"
        )
    inputs = {"input_ids": input_ids, **(extra_inputs or {})}
    longer = {name: size for name, size in windows.items() if size > longest_window(inputs)}
    if longer:
        stated = ", ".join(f"{name}={size}" for name, size in longer.items())
        notes.append(
            f"{stated} shortened in a pass of {input_ids.shape[1]} tokens so that a window shows; reach_tokens follows"
        )
    return inputs


def longest_window(inputs: Mapping[str, Any]) -> int:
    """The longest attention window, in tokens, that shows in a pass on `inputs`."""
    return max(int(inputs["input_ids"].shape[1]) - 2 * SLACK_TOKENS, 1)


def with_other_tokens(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments with the tokens in reverse order."""
    return {**inputs, "input_ids": inputs["input_ids"].flip(1)}


def run_model(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """One forward pass on `inputs`, without a key-value cache where the model has the switch."""
    inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    parameters = inspect.signature(model.forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    switch = {"use_cache": False} if "use_cache" in parameters or open_ended else {}
    if "input_ids" in parameters or open_ended:
        model(**{**switch, **inputs})
    else:
        model(*inputs.values(), **switch)


def _choose_length(model: nn.Module, config: Any, num_tokens: int, windows: Mapping[str, int]) -> int:
    if config is None:
        return num_tokens
    needed = [size + 2 * SLACK_TOKENS for size in (*windows.values(), *_compression_rates(config))]
    length = max([num_tokens, *(size for size in needed if size <= _MAX_PROBE_TOKENS)])
    return min(length, _position_limit(model, config) or length)


def _compression_rates(config: Any) -> list[int]:
    """How many tokens a compressed key stands for, where the model has such keys."""
    found: list[int] = []
    for name, value in vars(config).items():
        if re.search(r"compress\w*_rat(e|io)", name):
            values = list(value.values()) if isinstance(value, dict) else value
            found += [rate for rate in (values if isinstance(values, list) else [values]) if isinstance(rate, int)]
    return found


def _position_limit(model: nn.Module, config: Any) -> int | None:
    """The longest input, in tokens, of a model with learned positions or a stored mask; None for all others."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    values = [getattr(config, name, None) for name in names]
    limits = [value for value in values if isinstance(value, int) and value > 0]
    learned = any(
        isinstance(module, nn.Embedding) and re.search(r"pos|wpe", name) for name, module in model.named_modules()
    )
    masked = any(
        buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] and buffer.shape[-1] in limits
        for buffer in model.buffers()
    )
    return min(limits) if limits and (learned or masked) else None


def _random_ids(model: nn.Module, num_tokens: int, seed: int) -> Tensor:
    config = config_of(model)
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        vocabulary = max(sizes, default=0)
    top = getattr(model, "config", None)
    special = {
        value
        for source in (config, top)
        if hasattr(source, "__dict__")
        for name, value in vars(source).items()
        if isinstance(value, int) and re.search(r"token_(id|index)$|^(pad|bos|eos)", name)
    }
    allowed = [token for token in range(min(vocabulary, 50_000)) if token not in special]
    if len(allowed) < 2:
        raise ValueError(f"cannot draw random tokens: vocabulary of {vocabulary}; pass input_ids of shape [1, tokens]")
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(allowed), (1, num_tokens), generator=generator)
    device = next(model.parameters()).device
    return torch.tensor(allowed)[picks].to(device)
