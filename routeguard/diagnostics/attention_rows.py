"""Logits, probabilities and distances of a few queries against all keys, chunk by chunk: never a T × T matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from routeguard.diagnostics.attention_call import AttentionCall, masked_with

CHUNK_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class LogitChunk:
    """Logits of the queries from number `first` on against the keys from `start` on.

    Attributes:
        logits: [B, H, n − first, chunk], fp32, after soft cap, bias and mask.
        slope: derivative of the logits by the scaled products, of the same shape; None where it is 1 (no soft cap).
    """

    first: int
    start: int
    logits: Tensor
    slope: Tensor | None = None


def logit_chunks(
    call: AttentionCall, positions: list[int], *, chunk_tokens: int = CHUNK_TOKENS
) -> Iterator[LogitChunk]:
    """Logits of the queries at `positions` (ascending), key chunk by key chunk; what a query cannot see is −inf.

    Chunks that no query can see are left out, and so are the queries before a chunk where attention is causal.
    """
    query = call.query[:, :, positions].float() * call.scaling
    batch, heads, num, width = query.shape
    groups = call.key.shape[1]
    offset = call.num_keys - call.num_queries
    where = torch.tensor(positions, device=query.device) + offset
    for start in range(0, call.num_keys, chunk_tokens):
        stop = min(start + chunk_tokens, call.num_keys)
        first = _first_seeing(call, positions, start - offset)
        if first == num or _left_of_windows(call, positions[first] + offset, stop):
            continue
        rows = query[:, :, first:].reshape(batch, groups, heads // groups * (num - first), width)
        keys = call.key[:, :, start:stop].float()
        logits = (rows @ keys.transpose(-1, -2)).view(batch, heads, num - first, stop - start)
        slope = None
        if call.softcap is not None:
            capped = torch.tanh(logits / call.softcap)
            logits, slope = capped * call.softcap, 1 - capped.square()
        if call.bias is not None:
            logits = logits + _part(call.bias, positions[first:], start, stop)
        if call.mask is not None:
            logits = masked_with(logits, _part(call.mask, positions[first:], start, stop))
        else:
            logits = _hide(logits, call, where[first:], start, stop, positions[first] + offset)
        yield LogitChunk(first, start, logits, slope)


def mean_distances(call: AttentionCall, positions: list[int], *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """`Σ_s A[t,s]·(t − s)` in tokens for each head and each query at `positions` (ascending): [B, H, n], fp32.

    Memory is O(B · H · n · chunk_tokens). Probability on a sink stands for no token and adds nothing, as in the
    probabilities that eager attention reports. Source: paper, mean attention distance; the running sums are those of
    online softmax.
    """
    if call.probabilities is not None:
        keys = torch.arange(call.num_keys, device=call.probabilities.device)
        queries = torch.tensor(positions, device=keys.device) + call.num_keys - call.num_queries
        return (call.probabilities[:, :, positions].float() * (queries[:, None] - keys)).sum(-1)
    top, mass = _start(call, positions)
    distance = torch.zeros_like(mass)
    where = torch.tensor(positions, device=mass.device).float() + call.num_keys - call.num_queries
    for chunk in logit_chunks(call, positions, chunk_tokens=chunk_tokens):
        rows = slice(chunk.first, None)
        old = top[..., rows]
        new = torch.maximum(old, chunk.logits.amax(-1))
        weights = torch.exp_(chunk.logits - _finite(new).unsqueeze(-1))
        keys = torch.arange(weights.shape[-1], device=weights.device, dtype=torch.float32)
        sums = weights @ torch.stack([torch.ones_like(keys), keys], dim=-1)
        shrink = torch.exp(old - _finite(new))
        # Distances from the chunk's own start: subtracting large positions would cancel.
        nearer = sums[..., 0] * (where[rows] - chunk.start) - sums[..., 1]
        mass[..., rows] = mass[..., rows] * shrink + sums[..., 0]
        distance[..., rows] = distance[..., rows] * shrink + nearer
        top[..., rows] = new
    return distance / mass


def log_normalisers(call: AttentionCall, positions: list[int], *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """`log Σ_s exp(logit)` over the keys and the sink of each query at `positions` (ascending): [B, H, n], fp32."""
    top, mass = _start(call, positions)
    for chunk in logit_chunks(call, positions, chunk_tokens=chunk_tokens):
        rows = slice(chunk.first, None)
        new = torch.maximum(top[..., rows], chunk.logits.amax(-1))
        total = torch.exp_(chunk.logits - _finite(new).unsqueeze(-1)).sum(-1)
        mass[..., rows] = mass[..., rows] * torch.exp(top[..., rows] - _finite(new)) + total
        top[..., rows] = new
    return top + mass.log()


def attention_rows(call: AttentionCall, positions: list[int]) -> Tensor:
    """Probabilities of the queries at `positions` (ascending) over all keys: [B, H, n, S], fp32, sinks left out."""
    if call.probabilities is not None:
        return call.probabilities[:, :, positions].float()
    normalisers = log_normalisers(call, positions)
    rows = torch.zeros(*normalisers.shape, call.num_keys, device=normalisers.device)
    for chunk in logit_chunks(call, positions):
        stop = chunk.start + chunk.logits.shape[-1]
        rows[:, :, chunk.first :, chunk.start : stop] = torch.exp(
            chunk.logits - normalisers[..., chunk.first :].unsqueeze(-1)
        )
    return rows


def _start(call: AttentionCall, positions: list[int]) -> tuple[Tensor, Tensor]:
    """Greatest logit and mass of each query before any key: those of the sink, or of nothing."""
    shape = (call.query.shape[0], call.num_heads, len(positions))
    if call.sinks is None:
        device = call.query.device
        return torch.full(shape, -torch.inf, device=device), torch.zeros(shape, device=device)
    sinks = call.sinks.float()
    sinks = _rows_of(sinks, positions).squeeze(-1) if sinks.dim() == 4 else sinks.reshape(1, -1, 1)
    top = sinks.expand(shape).clone()
    return top, torch.ones_like(top)


def _first_seeing(call: AttentionCall, positions: list[int], key: int) -> int:
    """Number of the first of `positions` that may see a key (counted like queries)."""
    if call.mask is not None or not call.causal:
        return 0
    return next((number for number, position in enumerate(positions) if position >= key), len(positions))


def _left_of_windows(call: AttentionCall, query: int, stop: int) -> bool:
    return call.mask is None and call.causal and call.window is not None and stop <= query - call.window + 1


def _hide(logits: Tensor, call: AttentionCall, where: Tensor, start: int, stop: int, earliest: int) -> Tensor:
    if not call.causal:
        return logits
    keys = torch.arange(start, stop, device=logits.device)
    if stop - 1 > earliest:
        logits = logits.masked_fill(keys > where[:, None], -torch.inf)
    if call.window is not None:
        logits = logits.masked_fill(keys <= where[:, None] - call.window, -torch.inf)
    return logits


def _part(whole: Tensor, positions: list[int], start: int, stop: int) -> Tensor:
    """The rows at `positions` and the columns from `start` to `stop` of what broadcasts to [B, H, T, S]."""
    rows = _rows_of(whole, positions)
    return rows if rows.shape[-1] == 1 else rows[..., start:stop]


def _rows_of(whole: Tensor, positions: list[int]) -> Tensor:
    return whole if whole.shape[-2] == 1 else whole[..., positions, :]


def _finite(top: Tensor) -> Tensor:
    """Zero where no key was visible so far, so that nothing becomes NaN."""
    return torch.where(top == -torch.inf, 0.0, top)
