"""The teacher of the distillation: the same weights as a plain model, reading the text without its step tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from routeguard.state_transition.layout import PADDING, StepLayout


@dataclass(frozen=True)
class TeacherRows:
    """What the teacher reads: each sample in a row of its own, step tokens left out, padded on the right.

    Attributes:
        input_ids: [samples, tokens].
        attention_mask: the same shape, 0 for padding.
        row, place: [rows, tokens] of the student's text: where the teacher predicts the student's next plain token: at
            the last plain token up to there; −1 where a sample has none yet.
    """

    input_ids: Tensor
    attention_mask: Tensor
    row: Tensor
    place: Tensor


def teacher_rows(input_ids: Tensor, layout: StepLayout, token_ids: tuple[int, ...]) -> TeacherRows:
    """Take the step tokens out of a batch and unpack its samples.

    Args:
        input_ids: [rows, tokens].
        layout: of them.
        token_ids: of the step tokens.
    """
    marks = torch.isin(input_ids, torch.tensor(token_ids, device=input_ids.device))
    plain = ~marks & (layout.kind != PADDING)
    row = torch.full_like(input_ids, -1)
    place = torch.full_like(input_ids, -1)
    texts: list[Tensor] = []
    for index in range(input_ids.shape[0]):
        for sample in range(int(layout.sample[index].max()) + 1):
            inside = layout.sample[index] == sample
            kept = plain[index] & inside
            if not bool(kept.any()):
                continue
            counted = torch.cumsum(kept, 0) - 1
            known = inside & (counted >= 0)
            row[index] = torch.where(known, len(texts), row[index])
            place[index] = torch.where(known, counted, place[index])
            texts.append(input_ids[index][kept])
    longest = max((len(text) for text in texts), default=1)
    ids = input_ids.new_zeros(max(len(texts), 1), longest)
    mask = torch.zeros_like(ids)
    for number, text in enumerate(texts):
        ids[number, : len(text)], mask[number, : len(text)] = text, 1
    return TeacherRows(ids, mask, row, place)
