"""The decoder of a causal language model, and the model's own way from its hidden states to logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.diagnostics.running import run_tokens
from routeguard.recall.model_config import without_adapters

_PROBED_TOKENS = 16
_OTHER_NAMES = ("language_model", "text_model", "backbone_model")


@torch.no_grad()
def find_decoder(model: nn.Module, input_ids: Tensor) -> nn.Module:
    """The module below the output layer whose hidden states, a part at a time, give the model's own logits.

    That is tried out on the first tokens of `input_ids`; ValueError where no module does.
    """
    few = input_ids[:1, :_PROBED_TOKENS]
    own = run_tokens(model, few, keep_logits=True).logits.float()
    for decoder in _candidates(model):
        try:
            hidden, logits_of = decoded(model, decoder, few)
            parts = [logits_of(part).float() for part in hidden.split((few.shape[1] + 1) // 2, dim=1)]
            pieces = torch.cat(parts, dim=1)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            continue
        tolerance = 1e-3 if hidden.dtype in (torch.float32, torch.float64) else 0.1
        if pieces.shape == own.shape and bool((pieces - own).abs().max() <= tolerance * own.std()):
            return decoder
    raise ValueError(
        f"{type(model).__name__} has no decoder whose hidden states give its logits a few positions at a time, so the "
        "loss would need the logits of all positions; gradient_locality(..., loss_tokens=None) takes that memory "
        "(tokens × vocabulary)"
    )


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Modules that may be the decoder, the likeliest first; looks through adapters, and two levels deep."""
    near = _children(without_adapters(model))
    found = [*near, *(deeper for module in near for deeper in _children(module))]
    return list({id(module): module for module in found}.values())


def _children(module: nn.Module) -> list[nn.Module]:
    get_decoder = getattr(module, "get_decoder", None)
    found = [getattr(module, name, None) for name in ("base_model", "model", *_OTHER_NAMES)]
    found.append(get_decoder() if callable(get_decoder) else None)
    return [child for child in found if isinstance(child, nn.Module) and child is not module]


def decoded(model: nn.Module, decoder: nn.Module, input_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The decoder's last hidden states [1, T, width], and the model's own way from hidden states to logits."""
    outputs: list[Any] = []
    run = decoder.forward

    def keep(*args: Any, **kwargs: Any) -> Any:
        outputs.append(run(*args, **kwargs))
        return with_hidden(outputs[0], last_hidden(outputs[0])[:, -1:])  # logits of one position are enough here

    with replaced_forward(decoder, keep):
        run_tokens(model, input_ids, keep_logits=True)
    if len(outputs) != 1 or last_hidden(outputs[0]).shape[:-1] != input_ids.shape:
        raise ValueError(f"{type(decoder).__name__} runs {len(outputs)} times, or not over the tokens given")

    def logits_of(piece: Tensor) -> Tensor:
        with replaced_forward(decoder, lambda *args, **kwargs: with_hidden(outputs[0], piece)):
            logits: Tensor = run_tokens(model, input_ids, keep_logits=True).logits
        return logits

    return last_hidden(outputs[0]), logits_of


def last_hidden(output: Any) -> Tensor:
    hidden: Tensor = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    return hidden


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """The same output with other last hidden states."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    changed = copy.copy(output)
    changed["last_hidden_state"] = hidden
    return changed


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")  # accelerate, for one, puts its own there
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
