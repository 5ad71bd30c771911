"""Token texts with steps, small converted models, and the linear path token by token in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.convert import StateTransition, add_state_transition
from routeguard.state_transition.layout import ANSWER, STEP, StepLayout, step_layout
from tests.zoo.build import build

START, OTHER, END = 96, 97, 98  # the zoo's vocabulary ends with 95
SETTINGS: dict[str, Any] = {
    "start_token_ids": (START, OTHER),
    "end_token_id": END,
    "rank": 4,
    "chunk_tokens": 4,
    "max_steps": 4,
}


def config(**changes: Any) -> StateTransitionConfig:
    return StateTransitionConfig(**{**SETTINGS, **changes})


def text(*parts: int | str, seed: int = 0) -> Tensor:
    """[tokens]: a number is that many plain tokens; "(" and "[" open a step, ")" closes one."""
    generator = torch.Generator().manual_seed(seed)
    marks = {"(": START, "[": OTHER, ")": END}
    pieces = [
        torch.tensor([marks[part]]) if isinstance(part, str) else torch.randint(10, 80, (part,), generator=generator)
        for part in parts
    ]
    return torch.cat(pieces)


TWO_TEXTS = torch.stack(
    [
        text(6, "(", 5, ")", "[", 11, ")", "(", 7, ")", 5),  # three steps of unequal length, and an answer
        text(4, "[", 2, "(", 8, ")", 3, "[", 9, ")", "(", 8, seed=1),  # a broken step, words between, an open one
    ]
)


def layout_of(ids: Tensor, **options: Any) -> StepLayout:
    rows = ids if ids.dim() == 2 else ids[None]
    return step_layout(rows, start_token_ids=(START, OTHER), end_token_id=END, **options)


def converted(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> StateTransition:
    """A tiny model whose paths do something, as if they had been trained."""
    transition = add_state_transition(build(name).to(dtype), config(**changes))
    awaken(transition, seed=seed)
    return transition


def whole(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Logits of a text in one pass, without a cache."""
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=False, **options).logits
    return logits


def in_pieces(
    model: Any, ids: Tensor, cuts: Sequence[int], *, mask: Tensor | None = None, cache: Any = None
) -> tuple[Tensor, Any]:
    """Logits of a text read piece by piece with a cache (ours, new, if none is given), cut before those places."""
    cache = model.state_transition.new_cache() if cache is None else cache
    logits = []
    edges = [0, *cuts, ids.shape[1]]
    with torch.no_grad():
        for start, stop in pairwise(edges):
            options = {}
            if mask is not None:
                positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start:stop]
                options = {"attention_mask": mask[:, :stop], "position_ids": positions}
            logits.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **options).logits)
    return torch.cat(logits, 1), cache


def in_turn(model: Any, ids: Tensor, prefix: int, mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Logits of a text read up to `prefix` at once and then token by token, with the cache."""
    return in_pieces(model, ids, range(prefix, ids.shape[1]), mask=mask)


class Dictated(LogitsProcessor):
    """Writes given tokens at given lengths of the text, so that steps open and close on the way, row by row.

    Tokens in `never` are written nowhere else.
    """

    def __init__(self, *rows: dict[int, int], never: tuple[int, ...] = ()) -> None:
        self.rows, self.never = rows, list(never)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.never] = -1e9
        for row in range(len(scores)):
            token = self.rows[row * len(self.rows) // len(scores)].get(input_ids.shape[1])
            if token is not None:
                scores[row] = torch.full_like(scores[row], -1e9)
                scores[row, token] = 0
        return scores


def awaken(transition: StateTransition, *, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for path in transition.paths.values():
        for parameter in (path.multiplier, *path.up.parameters(), *(path.gate.parameters() if path.gate else ())):
            nn.init.normal_(parameter, std=0.5, generator=generator)


def read_in_loops(query: Tensor, key: Tensor, value: Tensor, layout: StepLayout, settings: StateTransitionConfig):
    """[rows, heads, tokens, value width]: the formulas of the paper as they stand, one token at a time."""
    rows, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(rows, heads, tokens, value.shape[-1], dtype=query.dtype)
    read = [[[None] * tokens for _ in range(heads)] for _ in range(rows)]
    for row in range(rows):
        for head in range(heads):
            state, past, partial, number, sample = None, [], None, 0, -1
            for i in range(tokens):
                kind, step = int(layout.kind[row, i]), int(layout.step[row, i])
                k, v = key[row, head // group, i], value[row, head // group, i]
                zero = torch.zeros(len(k), len(v), dtype=query.dtype)
                if int(layout.sample[row, i]) != sample:
                    state, past, partial, number = zero, [], None, 0
                sample = int(layout.sample[row, i])
                finished = step - 1 if kind == STEP else step
                if kind in (STEP, ANSWER) and finished > number:
                    number += 1
                    alpha = 0.0
                    if number > 1 and settings.max_alpha:
                        grown = number / settings.max_steps
                        low = settings.alpha_rule == "min"
                        alpha = min(settings.max_alpha, grown) if low else min(1.0, max(settings.max_alpha, grown))
                    mean = sum(past) / len(past) if past else zero
                    update = (1 - alpha) * partial + alpha * mean
                    past.append(update if settings.running_mean == "corrected" else partial)
                    state, partial = state + update, None
                if kind == STEP:
                    partial = zero if partial is None else partial
                    read[row][head][i] = query[row, head, i] @ (state + partial)
                    partial = partial + torch.outer(k, v)
                elif kind == ANSWER:
                    read[row][head][i] = query[row, head, i] @ state
    filled = [
        torch.stack([torch.stack([out[0, 0, 0] if r is None else r for r in of_head]) for of_head in of_row])
        for of_row in read
    ]
    return torch.stack(filled)
