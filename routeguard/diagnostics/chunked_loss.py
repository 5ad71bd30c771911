"""The loss of one sequence and its gradient on the last hidden states, with the logits of few positions at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from routeguard.diagnostics.decoder import decoded
from routeguard.diagnostics.running import run_tokens
from routeguard.diagnostics.sample_layouts import IGNORED

LOSS_TOKENS = 128  # positions whose logits are held at a time


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
    hidden, logits_of = decoded(model, decoder, input_ids)
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
