"""The two terms of the training: next-token loss, and distance from the base model's predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from routeguard.diagnostics.decoder import last_hidden, replaced_forward, with_hidden
from routeguard.diagnostics.sample_layouts import IGNORED
from routeguard.state_transition.layout import StepLayout
from routeguard.state_transition.teacher import TeacherRows, teacher_rows

if TYPE_CHECKING:
    from routeguard.state_transition.convert import StateTransition

LOSS_TOKENS = 256  # positions whose logits are held at a time


@dataclass(frozen=True)
class StepLosses:
    """Sums over tokens, in nats, and how many there were.

    Attributes:
        next_token: `−Σ log P(token)` over the labels that count (L_AR).
        distance: `Σ KL(P_base ‖ P)` over those of them that are no step tokens; both over the base vocabulary without
            step tokens.
        num_tokens, num_compared: labels that count, and those compared with the base.
    """

    next_token: Tensor
    distance: Tensor
    num_tokens: int
    num_compared: int


@contextmanager
def decoder_output(transition: StateTransition) -> Iterator[list[Any]]:
    """Inside, the outputs of the decoder are collected."""
    found: list[Any] = []
    handle = transition.decoder.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        yield found
    finally:
        handle.remove()


@torch.no_grad()
def teacher_output(transition: StateTransition, rows: TeacherRows) -> Any:
    """What the base model's decoder says of the teacher's rows: full attention, no path, no dropout, no gradient."""
    model = transition.model
    trained = model.training
    model.eval()
    try:
        with transition.disabled(), decoder_output(transition) as found:
            model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False, logits_to_keep=1)
    finally:
        model.train(trained)
    return found[0]


def step_losses(
    transition: StateTransition,
    output: Any,
    input_ids: Tensor,
    labels: Tensor,
    layout: StepLayout,
    *,
    compare: bool = True,
    loss_tokens: int = LOSS_TOKENS,
) -> StepLosses:
    """Both terms from the decoder's output, never holding the logits of more than `loss_tokens` positions.

    The teacher is the same model with the paths and step tokens switched off and full attention over the sample's text
    without step tokens; a position is compared where the next token is a plain one.

    Args:
        transition: in place.
        output: what the decoder put out for `input_ids`, with gradients.
        input_ids, labels: [rows, tokens]; labels −100 where the loss does not count.
        layout: of `input_ids`.
        compare: whether the base model is asked at all; otherwise `distance` is 0.
        loss_tokens: positions at a time.

    Source: arXiv 2602.01198, `L = L_AR + β·KL(P_base ‖ P)`; the teacher's context is ours.
    """
    token_ids = torch.tensor(transition.config.token_ids, device=input_ids.device)
    targets = labels[:, 1:]
    counted = targets != IGNORED
    if not compare:
        teacher, chosen = None, torch.zeros_like(counted)
    else:
        rows = teacher_rows(input_ids, layout, transition.config.token_ids)
        teacher = teacher_output(transition, rows)
        chosen = counted & ~torch.isin(targets, token_ids) & (rows.row[:, :-1] >= 0)
    hidden = last_hidden(output)
    zero = hidden.sum().float() * 0  # keeps the graph whole where nothing counts
    next_token, distance = zero, zero
    places = torch.nonzero(counted)
    for part in places.split(loss_tokens):
        row, place = part.unbind(1)
        compared = chosen[row, place]
        base = None
        if teacher is not None and bool(compared.any()):
            where = rows.row[row, place][compared], rows.place[row, place][compared]
            with torch.no_grad(), transition.disabled():
                base = _logits(transition, teacher, last_hidden(teacher)[where])
        ours, apart = checkpoint(
            _part, transition, output, hidden[row, place], targets[row, place], base, compared, use_reentrant=False
        )
        next_token, distance = next_token + ours, distance + apart
    return StepLosses(next_token, distance, len(places), int(chosen.sum()))


def _part(
    transition: StateTransition, output: Any, hidden: Tensor, targets: Tensor, base: Tensor | None, compared: Tensor
) -> tuple[Tensor, Tensor]:
    """Both sums over a few positions: hidden [positions, width], targets and `compared` [positions], base logits."""
    with transition.paused():
        logits = _logits(transition, output, hidden)
    next_token = functional.cross_entropy(logits, targets.to(logits.device), reduction="sum")
    if base is None:
        return next_token, next_token.new_zeros(())
    size = transition.tokens.base_size
    inside = [token for token in transition.config.token_ids if token < size]
    plain = torch.ones(size, dtype=torch.bool, device=logits.device)
    plain[inside] = False
    ours = torch.log_softmax(logits[compared][:, :size][:, plain], -1)
    theirs = torch.log_softmax(base[:, :size][:, plain], -1)
    return next_token, functional.kl_div(ours, theirs, reduction="sum", log_target=True)


def _logits(transition: StateTransition, output: Any, hidden: Tensor) -> Tensor:
    """The model's own logits of hidden states [positions, width], in fp32: whatever it scales or caps is in."""
    few = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    with replaced_forward(transition.decoder, lambda *args, **kwargs: with_hidden(output, hidden[None])):
        logits: Tensor = transition.model(input_ids=few, use_cache=False).logits
    return logits[0].float()
