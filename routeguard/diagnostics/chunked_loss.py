"""The loss of one sequence and its gradient on the last hidden states, with the logits of few positions at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from routeguard.diagnostics.running import run_tokens
from routeguard.diagnostics.sample_layouts import IGNORED

LOSS_TOKENS = 128  # positions whose logits are held at a time
_PROBED_TOKENS = 16
_OTHER_NAMES = ("language_model", "text_model", "backbone_model")


@dataclass(frozen=True)
class SequenceLoss:
    """A loss, and where its backward pass has to go on.

    Attributes:
        value: mean over the labels that count, nats a token.
        end: where the graph ends: the last hidden states, or the loss itself.
        gradient: of the loss by `end`; None where `end` is the loss.
    """

    value: float
    end: Tensor
    gradient: Tensor | None


def chunked_loss(
    model: nn.Module, input_ids: Tensor, labels: Tensor, *, decoder: nn.Module, loss_tokens: int = LOSS_TOKENS
) -> SequenceLoss:
    """Compute the loss of next-token training without ever holding the logits of more than `loss_tokens` positions.

    The decoder runs once. From its output to the logits the model's own forward function is used, a few positions at a
    time, with the decoder's output handed to it: whatever it scales, caps or normalises there is in the loss.

    Args:
        model: a causal language model; gradients must be enabled.
        input_ids: [1, T].
        labels: [1, T], −100 where the loss does not count. At least one of those after the first token must.
        decoder: what `find_decoder` says.
        loss_tokens: positions at a time, 1 or more.

    Source: derived (the loss is a sum over positions, and what follows the decoder acts on each position alone).
    """
    hidden, logits_of = _decoded(model, decoder, input_ids)
    targets = labels[0, 1:].to(hidden.device)
    counted = torch.nonzero(targets != IGNORED).flatten()
    gradient = torch.zeros_like(hidden)
    total = 0.0
    for places in counted.split(loss_tokens):
        piece = hidden.detach()[:, places].requires_grad_(True)
        logits = logits_of(piece)[0].float()
        loss = functional.cross_entropy(logits, targets[places].to(logits.device), reduction="sum") / len(counted)
        (gradient[:, places],) = torch.autograd.grad(loss, [piece])
        total += float(loss.detach())
    return SequenceLoss(total, hidden, gradient)


def plain_loss(model: nn.Module, input_ids: Tensor, labels: Tensor) -> SequenceLoss:
    """The same loss in one piece, with the logits of all positions."""
    logits = run_tokens(model, input_ids, keep_logits=True).logits
    targets = labels[0, 1:].to(logits.device)
    loss = functional.cross_entropy(logits[0, :-1].float(), targets, ignore_index=IGNORED)
    return SequenceLoss(float(loss.detach()), loss, None)


@torch.no_grad()
def find_decoder(model: nn.Module, input_ids: Tensor) -> nn.Module:
    """The module below the output layer whose hidden states, a part at a time, give the model's own logits.

    That is tried out on the first tokens of `input_ids`; ValueError where no module does.
    """
    few = input_ids[:1, :_PROBED_TOKENS]
    own = run_tokens(model, few, keep_logits=True).logits.float()
    for decoder in _candidates(model):
        try:
            hidden, logits_of = _decoded(model, decoder, few)
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
    get_base_model = getattr(model, "get_base_model", None)
    inner = get_base_model() if callable(get_base_model) else model
    near = _children(inner)
    found = [*near, *(deeper for module in near for deeper in _children(module))]
    return list({id(module): module for module in found}.values())


def _children(module: nn.Module) -> list[nn.Module]:
    get_decoder = getattr(module, "get_decoder", None)
    found = [getattr(module, name, None) for name in ("base_model", "model", *_OTHER_NAMES)]
    found.append(get_decoder() if callable(get_decoder) else None)
    return [child for child in found if isinstance(child, nn.Module) and child is not module]


def _decoded(model: nn.Module, decoder: nn.Module, input_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The decoder's last hidden states [1, T, width], and the model's own way from hidden states to logits."""
    outputs: list[Any] = []
    run = decoder.forward

    def keep(*args: Any, **kwargs: Any) -> Any:
        outputs.append(run(*args, **kwargs))
        return _with_hidden(outputs[0], _hidden(outputs[0])[:, -1:])  # logits of one position are enough here

    with _replaced_forward(decoder, keep):
        run_tokens(model, input_ids, keep_logits=True)
    if len(outputs) != 1 or _hidden(outputs[0]).shape[:-1] != input_ids.shape:
        raise ValueError(f"{type(decoder).__name__} runs {len(outputs)} times, or not over the tokens given")

    def logits_of(piece: Tensor) -> Tensor:
        with _replaced_forward(decoder, lambda *args, **kwargs: _with_hidden(outputs[0], piece)):
            logits: Tensor = run_tokens(model, input_ids, keep_logits=True).logits
        return logits

    return _hidden(outputs[0]), logits_of


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    return hidden


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The same output with other last hidden states."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    changed = copy.copy(output)
    changed["last_hidden_state"] = hidden
    return changed


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")  # accelerate, for one, puts its own there
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
