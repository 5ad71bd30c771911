"""Which tokens are prompt, which step they belong to, and what may look at what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PADDING, PROMPT, STEP, ANSWER = -1, 0, 1, 2


@dataclass(frozen=True)
class TextEnd:
    """Where each row of a batch stands after its last real token; what `step_layout` needs to go on with it.

    Attributes:
        step: [rows], how many steps began.
        open: [rows] booleans, the last of them has not ended.
        segment: [rows], the stretch that a plain token would belong to.
    """

    step: Tensor
    open: Tensor
    segment: Tensor

    @property
    def finished(self) -> Tensor:
        """[rows], how many steps ended."""
        return self.step - self.open.long()

    @classmethod
    def of_nothing(cls, rows: int, device: torch.device) -> TextEnd:
        """The end of a text without tokens: a prompt goes on."""
        zero = torch.zeros(rows, dtype=torch.long, device=device)
        return cls(zero, zero.bool(), zero)

    def select(self, rows: Tensor) -> TextEnd:
        """Those rows, in that order."""
        return TextEnd(self.step[rows], self.open[rows], self.segment[rows])


@dataclass(frozen=True)
class StepLayout:
    """The steps of a batch of token rows. All tensors are [rows, tokens] integers.

    A sample is prompt, steps, and whatever stands outside the steps after the first one: the answer, which reads the
    state and adds nothing to it. A start token inside a step opens the next one; an end token outside is plain text.

    Attributes:
        kind: PADDING, PROMPT, STEP or ANSWER.
        sample: which packed sample of the row, from 0.
        step: t of a token's step, from 1; in an answer, how many steps came before it; 0 in a prompt.
        segment: which stretch of the row (a prompt, a step, an answer), from 0; padding does not end one.
        end: where the rows stand after these tokens.
    """

    kind: Tensor
    sample: Tensor
    step: Tensor
    segment: Tensor
    end: TextEnd

    @property
    def single(self) -> bool:
        """Whether no row has more than a prompt and one step, where full attention and block attention are the same."""
        return not bool((self.kind == ANSWER).any() or (self.step > 1).any() or (self.sample > 0).any())


@dataclass(frozen=True)
class Stretch:
    """A prompt, a step or an answer: the tokens `start` to `stop` of a row, with what `StepLayout` says of them."""

    kind: int
    sample: int
    step: int
    segment: int
    start: int
    stop: int


def stretches(layout: StepLayout) -> Iterator[list[Stretch]]:
    """For each row its stretches, in order."""
    table = torch.stack([layout.kind, layout.sample, layout.step, layout.segment], -1).cpu()
    for row in table:
        about, counts = torch.unique_consecutive(row, dim=0, return_counts=True)
        stops = torch.cumsum(counts, 0)
        yield [
            Stretch(kind, sample, step, segment, stop - count, stop)
            for (kind, sample, step, segment), count, stop in zip(
                about.tolist(), counts.tolist(), stops.tolist(), strict=True
            )
        ]


def step_layout(
    input_ids: Tensor,
    *,
    start_token_ids: tuple[int, ...],
    end_token_id: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    before: TextEnd | None = None,
) -> StepLayout:
    """Find the steps of token rows.

    Args:
        input_ids: [rows, tokens].
        start_token_ids, end_token_id: the step tokens.
        attention_mask: [rows, tokens], 0 for padding, wherever it stands. None: no padding.
        position_ids: [rows, tokens] or [1, tokens]; a 0 after other positions begins another packed sample. None: one
            sample a row.
        before: where the text stood that these tokens go on with; its last stretch is segment 0. None: a text begins.
    """
    device = input_ids.device
    if before is None:
        before = TextEnd.of_nothing(len(input_ids), device)
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    places = torch.arange(input_ids.shape[1], device=device).expand_as(input_ids)
    starts = torch.isin(input_ids, torch.tensor(start_token_ids, device=device)) & real
    ends = (input_ids == end_token_id) & real

    first = torch.zeros_like(real)
    if position_ids is not None:
        first = (position_ids.expand_as(input_ids) == 0) & real & (torch.cumsum(real, 1) > 1)
    sample = torch.cumsum(first, 1)
    began = torch.cummax(torch.where(first, places, 0), 1).values  # where the token's sample begins

    counted = torch.cumsum(starts, 1)
    earlier = torch.where(began > 0, counted.gather(1, (began - 1).clamp_min(0)), 0)
    step = counted - earlier + before.step[:, None]
    # Of each token and of one after the last: begins before the first place where the text before left a step open.
    last_start = _latest(starts, torch.where(before.open, -1, -2))
    last_end = _latest(ends, torch.full_like(before.step, -2))
    last_start = torch.cat([last_start, last_start[:, -1:]], 1)
    last_end = torch.cat([torch.full_like(last_end[:, :1], -2), last_end], 1)  # an end token is still in its step
    inside = last_start > last_end
    kinds = _kinds(torch.cat([step, step[:, -1:]], 1), inside)

    steps_around = torch.cat([before.step[:, None], step, step[:, -1:]], 1)
    kinds_around = torch.cat([_kinds(before.step, before.open)[:, None], kinds], 1)
    changes = (kinds_around[:, 1:] != kinds_around[:, :-1]) | (steps_around[:, 1:] != steps_around[:, :-1])
    changes[:, :-1] |= first
    segment = torch.cumsum(changes, 1)
    kind = torch.where(real, kinds[:, :-1], PADDING)
    return StepLayout(kind, sample, step, segment[:, :-1], TextEnd(step[:, -1], inside[:, -1], segment[:, -1]))


def _latest(marks: Tensor, before: Tensor) -> Tensor:
    """[rows, tokens]: the place of the last mark up to each token, `before` [rows] where there is none."""
    places = torch.arange(marks.shape[1], device=marks.device)
    return torch.cummax(torch.where(marks, places, before[:, None]), 1).values


def _kinds(step: Tensor, inside: Tensor) -> Tensor:
    """Of tokens, padding aside: by how many steps began, and whether the token is inside the last of them."""
    return torch.where(step == 0, PROMPT, torch.where(inside, STEP, ANSWER))


def visible(layout: StepLayout) -> Tensor:
    """[rows, 1, tokens, tokens] booleans: a token sees the prompt of its sample and its own step, up to itself.

    A padding token sees itself, so that no row of the softmax is empty.
    """
    kind, sample, segment = layout.kind, layout.sample, layout.segment
    num_tokens = kind.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=kind.device).tril()
    same_sample = sample[:, :, None] == sample[:, None, :]
    near = (segment[:, :, None] == segment[:, None, :]) | (kind == PROMPT)[:, None, :]
    real = (kind != PADDING)[:, None, :]
    itself = torch.eye(num_tokens, dtype=torch.bool, device=kind.device)
    return ((causal & same_sample & near & real) | itself)[:, None]


def block_mask(layout: StepLayout) -> Any:
    """The same for FlexAttention, as a BlockMask: no tokens × tokens tensor is kept."""
    from torch.nn.attention.flex_attention import create_block_mask

    sample, segment = layout.sample, layout.segment
    prompt, real = layout.kind == PROMPT, layout.kind != PADDING

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (segment[row, query] == segment[row, key]) | prompt[row, key]
        before = (key <= query) & (sample[row, query] == sample[row, key])
        return (before & near & real[row, key]) | (key == query)

    rows, tokens = layout.kind.shape
    return create_block_mask(sees, rows, None, tokens, tokens, device=str(layout.kind.device))
