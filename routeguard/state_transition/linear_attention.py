"""Linear attention over steps with momentum between them, for whole sequences at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routeguard.state_transition.accumulation import exact
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import ANSWER, STEP, StepLayout, Stretch, stretches
from routeguard.state_transition.momentum import coefficients

CARRIED = 3  # the state without the open step, the running mean, the open step's own sum


@dataclass(frozen=True)
class ChunkPlan:
    """Tokens of steps and answers, cut into chunks that never cross the end of a step.

    Attributes:
        places: [rows, chunks, chunk_tokens], where each token stands in its row; −1 for none.
        mixing: [rows, 3 + chunks, 3 + chunks] float64. Columns: how much each of the three carried matrices of the text
            before (`CARRIED`), and each chunk's `Σ kᵀv`, counts. Rows: in those three after the text, and in the state
            before each chunk.
        within: [rows, chunks], whether tokens also see the earlier ones of their own chunk: in steps, not in answers.
    """

    places: Tensor
    mixing: Tensor
    within: Tensor


def plan_chunks(layout: StepLayout, config: StateTransitionConfig, finished: Tensor | None = None) -> ChunkPlan:
    """Cut the steps and answers of each row into chunks and work out the state before each. Derived.

    Args:
        layout: of the tokens.
        config: chunk length and momentum.
        finished: [rows], how many steps of each row ended before these tokens. None: a text begins.
    """
    found = list(stretches(layout))
    longest = max((s.stop - s.start for row in found for s in row if s.kind in (STEP, ANSWER)), default=1)
    chunk_tokens = min(config.chunk_tokens, longest)
    rows = [_chunks(row, chunk_tokens) for row in found]
    most = max((len(chunks) for chunks in rows), default=0)
    places = torch.full((len(rows), most, chunk_tokens), -1, dtype=torch.long)
    mixing = torch.zeros(len(rows), CARRIED + most, CARRIED + most, dtype=torch.float64)
    within = torch.zeros(len(rows), most, dtype=torch.bool)
    before = [0] * len(rows) if finished is None else finished.tolist()
    ends = zip(layout.end.finished.tolist(), layout.end.open.tolist(), strict=True)
    for row, (chunks, done_before, end) in enumerate(zip(rows, before, ends, strict=True)):
        used = CARRIED + len(chunks)
        mixing[row, :used, :used] = _mixing(chunks, config, done_before, *end)
        if chunks:
            start, stop = (torch.tensor([getattr(chunk, name) for chunk in chunks]) for name in ("start", "stop"))
            place = start[:, None] + torch.arange(chunk_tokens)
            places[row, : len(chunks)] = torch.where(place < stop[:, None], place, -1)
            within[row, : len(chunks)] = torch.tensor([chunk.kind == STEP for chunk in chunks])
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


def _mixing(chunks: list[Stretch], config: StateTransitionConfig, before: int, after: int, is_open: bool) -> Tensor:
    """[3 + chunks, 3 + chunks] of one row, in which `before` steps had ended, and `after` have at its end.

    Steps are counted from `before` here: 1 is the step that may be open. Its carried sum is as good as a chunk of it.
    """
    ended = after - before
    last_sample = chunks[-1].sample if chunks else 0
    # Written, in order: step, whether it writes at all, sample.
    written = [(1, True, 0), *((chunk.step - before, chunk.kind == STEP, chunk.sample) for chunk in chunks)]
    # Read: how many steps are finished for it, the step of which it holds what was written so far, sample, turn.
    last = last_sample, len(written)
    read = [(ended, 0, *last), (ended, 0, *last), (0, ended + 1 if is_open else 0, *last)]
    read += [(step - own, step * own, sample, turn) for turn, (step, own, sample) in enumerate(written[1:], 1)]
    step, writes, sample = torch.tensor(written).unbind(1)
    done, own, of_sample, turn = torch.tensor(read)[:, :, None].unbind(1)
    table = coefficients(max(1, ended, int(step.max())), config, before)
    weights = table.states[done[:, 0]]
    weights[1], weights[2] = table.means[ended], 0
    finished = weights[:, 1:].gather(1, step.clamp_min(1).expand(len(read), -1))
    so_far = (step == own) & (torch.arange(len(written)) < turn)
    by_step = torch.where(step <= done, finished, so_far.double()) * (writes.bool() & (sample == of_sample))
    return torch.cat([weights[:, :2], by_step], 1)


@exact
def chunked_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: ChunkPlan, carried: Tensor | None = None
) -> Tensor:
    """What each token reads: `o_i = q_i·(S_{t−1} + Σ_{j<i in its step} k_jᵀ v_j)`; 0 in prompts.

    Args:
        query: [rows, heads, tokens, width]; already featured and scaled.
        key, value: [rows, key heads, tokens, width or value width].
        plan: of those rows.
        carried: [rows, key heads, 3, width, value width], of the text before (`CARRIED`). None: a text begins.

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
    read = torch.einsum("rkgncd,rknde->rkgnce", query_parts, _states(key_parts, value_parts, plan, carried))
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


@exact
def carried_on(key: Tensor, value: Tensor, plan: ChunkPlan, carried: Tensor) -> Tensor:
    """The three carried matrices after the tokens of `plan`: [rows, key heads, 3, width, value width], as before."""
    key, value = key.to(carried.dtype), value.to(carried.dtype)
    sums = torch.cat([carried, _gathered(key, plan).transpose(-1, -2) @ _gathered(value, plan)], 2)
    return torch.einsum("rnm,rkmde->rknde", plan.mixing[:, :CARRIED].to(sums.dtype), sums)


def _states(key_parts: Tensor, value_parts: Tensor, plan: ChunkPlan, carried: Tensor | None = None) -> Tensor:
    """The state before each chunk: [rows, key heads, chunks, width, value width]."""
    sums = key_parts.transpose(-1, -2) @ value_parts
    mixing = plan.mixing[:, CARRIED:].to(sums.dtype)
    if carried is None:
        return torch.einsum("rnm,rkmde->rknde", mixing[:, :, CARRIED:], sums)
    return torch.einsum("rnm,rkmde->rknde", mixing, torch.cat([carried.to(sums.dtype), sums], 2))


def _gathered(tensor: Tensor, plan: ChunkPlan) -> Tensor:
    """[rows, heads, tokens, width] by chunks: [rows, heads, chunks, chunk_tokens, width], 0 where there is no token."""
    index = plan.places.clamp_min(0).flatten(1)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[-1])
    parts = tensor.gather(2, index).unflatten(2, (*plan.places.shape[1:],))
    kept: Tensor = parts * (plan.places >= 0)[:, None, :, :, None]
    return kept
