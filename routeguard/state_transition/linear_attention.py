"""Linear attention over steps with momentum between them, for whole sequences at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import ANSWER, STEP, StepLayout, Stretch, stretches
from routeguard.state_transition.momentum import state_coefficients


@dataclass(frozen=True)
class ChunkPlan:
    """Tokens of steps and answers, cut into chunks that never cross the end of a step.

    Attributes:
        places: [rows, chunks, chunk_tokens], where each token stands in its row; −1 for none.
        mixing: [rows, chunks, chunks] float64: how much each chunk's `Σ kᵀv` counts in the state before each chunk.
        within: [rows, chunks], whether tokens also see the earlier ones of their own chunk: in steps, not in answers.
    """

    places: Tensor
    mixing: Tensor
    within: Tensor


def plan_chunks(layout: StepLayout, config: StateTransitionConfig) -> ChunkPlan:
    """Cut the steps and answers of each row into chunks and work out the state before each. Derived."""
    rows = [_chunks(row, config.chunk_tokens) for row in stretches(layout)]
    most = max((len(chunks) for chunks in rows), default=0)
    places = torch.full((len(rows), most, config.chunk_tokens), -1, dtype=torch.long)
    mixing = torch.zeros(len(rows), most, most, dtype=torch.float64)
    within = torch.zeros(len(rows), most, dtype=torch.bool)
    coefficients = state_coefficients(
        max(1, int(layout.step.max())),
        max_alpha=config.max_alpha,
        max_steps=config.max_steps,
        rule=config.alpha_rule,
        mean=config.running_mean,
    )
    for row, chunks in enumerate(rows):
        number = len(chunks)
        for index, chunk in enumerate(chunks):
            places[row, index, : chunk.stop - chunk.start] = torch.arange(chunk.start, chunk.stop)
        if chunks:
            mixing[row, :number, :number] = _mixing(chunks, coefficients)
            within[row, :number] = torch.tensor([chunk.kind == STEP for chunk in chunks])
    device = layout.kind.device
    return ChunkPlan(places.to(device), mixing.to(device), within.to(device))


def _chunks(row: list[Stretch], chunk_tokens: int) -> list[Stretch]:
    """The row's steps and answers, in pieces of `chunk_tokens` at most."""
    return [
        replace(stretch, start=start, stop=min(start + chunk_tokens, stretch.stop))
        for stretch in row
        if stretch.kind in (STEP, ANSWER)
        for start in range(stretch.start, stretch.stop, chunk_tokens)
    ]


def _mixing(chunks: list[Stretch], coefficients: Tensor) -> Tensor:
    """[chunks, chunks]: how much the second one's `Σ kᵀv` counts in the state before the first."""
    kind, sample, step, segment = (
        torch.tensor([getattr(chunk, name) for chunk in chunks]) for name in ("kind", "sample", "step", "segment")
    )
    writes = (kind == STEP).unsqueeze(0)
    # The state that a chunk starts from: after the steps before its own; an answer's, after all before it.
    done = torch.where(kind == STEP, step - 1, step)
    earlier = writes & (sample[:, None] == sample[None, :]) & (step[None, :] <= done[:, None])
    weight = coefficients[done[:, None], (step[None, :] - 1).clamp_min(0)]
    order = torch.arange(len(chunks))
    same_step = writes & (segment[:, None] == segment[None, :]) & (order[None, :] < order[:, None])
    return torch.where(earlier, weight, same_step.double())


def chunked_attention(query: Tensor, key: Tensor, value: Tensor, plan: ChunkPlan) -> Tensor:
    """What each token reads: `o_i = q_i·(S_{t−1} + Σ_{j<i in its step} k_jᵀ v_j)`; 0 in prompts.

    Args:
        query: [rows, heads, tokens, width]; already featured and scaled.
        key, value: [rows, key heads, tokens, width or value width].
        plan: of those rows.

    Returns: [rows, heads, tokens, value width], in the inputs' dtype (fp32 inside where that is narrower).

    Source: arXiv 2602.01198, linear attention path; the chunks are derived.
    """
    rows, heads, tokens, _ = query.shape
    key_heads, value_width = key.shape[1], value.shape[-1]
    narrow = query.dtype
    inside = torch.float64 if narrow == torch.float64 else torch.float32
    out = torch.zeros(rows, heads, tokens, value_width, dtype=inside, device=query.device)
    if plan.places.shape[1] == 0:
        return out.to(narrow)
    held = plan.places >= 0
    taken = plan.places.clamp_min(0).flatten(1)
    chunks = (*plan.places.shape[1:],)

    def gathered(tensor: Tensor) -> Tensor:
        index = taken[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[-1])
        parts = tensor.to(inside).gather(2, index).unflatten(2, chunks)
        kept: Tensor = parts * held[:, None, :, :, None]
        return kept

    groups = heads // key_heads
    query_parts = gathered(query).unflatten(1, (key_heads, groups))  # [rows, key heads, groups, chunks, C, width]
    key_parts, value_parts = gathered(key), gathered(value)
    sums = key_parts.transpose(-1, -2) @ value_parts
    states = torch.einsum("rnm,rkmde->rknde", plan.mixing.to(inside), sums)
    read = torch.einsum("rkgncd,rknde->rkgnce", query_parts, states)
    scores = torch.einsum("rkgncd,rknjd->rkgncj", query_parts, key_parts).tril(-1)
    scores = scores * plan.within[:, None, None, :, None, None]
    read = read + torch.einsum("rkgncj,rknje->rkgnce", scores, value_parts)
    read = (read * held[:, None, None, :, :, None]).flatten(1, 2).flatten(2, 3)  # [rows, heads, chunks·C, value width]
    index = taken[:, None, :, None].expand(-1, heads, -1, value_width)
    return out.scatter_add(2, index, read).to(narrow)
