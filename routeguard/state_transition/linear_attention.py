"""Linear attention over steps with momentum between them, for whole sequences at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routeguard.state_transition.accumulation import exact
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
    found = list(stretches(layout))
    longest = max((s.stop - s.start for row in found for s in row if s.kind in (STEP, ANSWER)), default=1)
    chunk_tokens = min(config.chunk_tokens, longest)
    rows = [_chunks(row, chunk_tokens) for row in found]
    most = max((len(chunks) for chunks in rows), default=0)
    places = torch.full((len(rows), most, chunk_tokens), -1, dtype=torch.long)
    mixing = torch.zeros(len(rows), most, most, dtype=torch.float64)
    within = torch.zeros(len(rows), most, dtype=torch.bool)
    coefficients = state_coefficients(max(1, int(layout.step.max())), config)
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


@exact
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
    inside = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.zeros(rows, heads, tokens, value_width, dtype=inside, device=query.device)
    if plan.places.shape[1] == 0:
        out = out + 0 * (query.sum() + key.sum() + value.sum())  # gradients of 0, not none: DDP waits for each
        return out.to(query.dtype)
    key_parts, value_parts = _gathered(key.to(inside), plan), _gathered(value.to(inside), plan)
    # [rows, key heads, groups, chunks, chunk_tokens, width]
    query_parts = _gathered(query.to(inside), plan).unflatten(1, (key_heads, heads // key_heads))
    read = torch.einsum("rkgncd,rknde->rkgnce", query_parts, _states(key_parts, value_parts, plan))
    scores = torch.einsum("rkgncd,rknjd->rkgncj", query_parts, key_parts).tril(-1)
    scores = scores * plan.within[:, None, None, :, None, None]
    read = read + torch.einsum("rkgncj,rknje->rkgnce", scores, value_parts)
    held = (plan.places >= 0)[:, None, None, :, :, None]
    read = (read * held).flatten(1, 2).flatten(2, 3)  # [rows, heads, chunks · chunk_tokens, value width]
    index = plan.places.clamp_min(0).flatten(1)[:, None, :, None].expand(-1, heads, -1, value_width)
    return out.scatter_add(2, index, read).to(query.dtype)


@exact
def state_norm(key: Tensor, value: Tensor, plan: ChunkPlan) -> Tensor | None:
    """Mean Frobenius norm of the states before each row's last chunk, over rows and key heads; None without chunks."""
    if plan.places.shape[1] == 0:
        return None
    states = _states(_gathered(key.float(), plan), _gathered(value.float(), plan), plan)
    last = (plan.places[:, :, 0] >= 0).sum(1).clamp_min(1) - 1
    norms: Tensor = states[torch.arange(len(last), device=last.device), :, last].norm(dim=(-2, -1))
    return norms.mean()


def _states(key_parts: Tensor, value_parts: Tensor, plan: ChunkPlan) -> Tensor:
    """The state before each chunk: [rows, key heads, chunks, width, value width]."""
    sums = key_parts.transpose(-1, -2) @ value_parts
    return torch.einsum("rnm,rkmde->rknde", plan.mixing.to(sums.dtype), sums)


def _gathered(tensor: Tensor, plan: ChunkPlan) -> Tensor:
    """[rows, heads, tokens, width] by chunks: [rows, heads, chunks, chunk_tokens, width], 0 where there is no token."""
    index = plan.places.clamp_min(0).flatten(1)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[-1])
    parts = tensor.gather(2, index).unflatten(2, (*plan.places.shape[1:],))
    kept: Tensor = parts * (plan.places >= 0)[:, None, :, :, None]
    return kept
