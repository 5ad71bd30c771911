"""Baselines that keep a fixed number of places: first tokens and a window, or heavy hitters and a window.

Heavy hitters are H2O's rule (arXiv 2306.14048), written for this comparison: of the keys older than a window, each key
head keeps those that have been attended to most, summed over all queries so far. Sinks and a window are StreamingLLM's
(arXiv 2309.17453). Keys keep the rotary positions that they were read at; StreamingLLM numbers the kept ones anew.

Both come in two forms that give the same results: a cache that drops keys and values (for bytes and time), and a pass
over a whole text (for scores).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

SINKS = 4
HEAVY_HITTERS = "heavy_hitters"


class EvictingLayer(DynamicLayer):
    """Keys and values of one layer, some of them dropped; `seen` counts the whole text."""

    kept = "sinks and a window"

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places, self.seen = places, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.keys.shape[-2] if self.is_initialized else 0
        return held + query_length, self.seen - held

    def evict(self, weights: Tensor | None) -> None:
        """Drop the middle: what is neither among the first tokens nor in the window."""
        held = self.keys.shape[-2]
        if held > self.places:
            window = self.places - SINKS
            self.keys, self.values = (
                torch.cat([held_states[..., :SINKS, :], held_states[..., -window:, :]], -2)
                for held_states in (self.keys, self.values)
            )


class HeavyHitterLayer(EvictingLayer):
    """Of one layer: half of the places for what was attended to most, half for the last tokens."""

    kept = "heavy hitters and a window"

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.scores: Tensor | None = None  # [rows, key heads, held], attention that each key got so far

    def evict(self, weights: Tensor | None) -> None:
        """Add the attention [rows, heads, queries, held] that the keys got, and drop those that got least."""
        if weights is None:
            raise ValueError("heavy hitters need attention weights: load the model with attn_implementation='eager'")
        got = weights.unflatten(1, (self.keys.shape[1], -1)).sum((2, 3))
        held = got.shape[-1]
        known = got[..., :0] if self.scores is None else self.scores
        self.scores = got + nn.functional.pad(known, (0, held - known.shape[-1]))
        if held <= self.places:
            return
        recent = self.places // 2
        old = self.scores[..., : held - recent].topk(self.places - recent, -1).indices.sort(-1).values
        new = torch.arange(held - recent, held, device=old.device).expand(*old.shape[:-1], -1)
        kept = torch.cat([old, new], -1)
        index = kept[..., None]
        self.keys = self.keys.gather(2, index.expand(*kept.shape, self.keys.shape[-1]))
        self.values = self.values.gather(2, index.expand(*kept.shape, self.values.shape[-1]))
        self.scores = self.scores.gather(2, kept)


@contextmanager
def evicting_cache(
    model: Any, attention: dict[int, nn.Module], kind: type[EvictingLayer], places: int
) -> Iterator[Any]:
    """A cache whose layers hold `places` places at most; inside, each attention layer evicts when it has read.

    Args:
        model: the base model; with eager attention for `HeavyHitterLayer`.
        attention: by decoder layer, the attention modules whose keys are evicted.
        kind: which rule.
        places: that are held, per layer.
    """
    cache = DynamicCache(config=model.config)
    handles = []
    for layer, module in attention.items():
        kept = cache.layers[layer] = kind(places)
        handles.append(module.register_forward_hook(lambda _, args, output, kept=kept: kept.evict(output[1])))
    try:
        yield cache
    finally:
        for handle in handles:
            handle.remove()


def window_mask(num_tokens: int, places: int) -> Tensor:
    """[1, 1, tokens, tokens], 0 where a token sees another while sinks and a window are kept, −∞ elsewhere."""
    place = torch.arange(num_tokens)
    near = place[:, None] - place[None, :] <= places - SINKS
    seen = (near | (place[None, :] < SINKS)) & (place[None, :] <= place[:, None])
    return torch.zeros(1, 1, num_tokens, num_tokens).masked_fill(~seen, -torch.inf)


@contextmanager
def evicting_in_one_pass(
    model: Any, kind: type[EvictingLayer], places: int, num_tokens: int
) -> Iterator[dict[str, Any]]:
    """Inside, the model reads a whole text of `num_tokens` as it would have token by token; yields more arguments."""
    if kind is not HeavyHitterLayer:
        yield {"attention_mask": window_mask(num_tokens, places)}
        return
    before = model.config._attn_implementation
    AttentionInterface.register(HEAVY_HITTERS, partial(_heavy_hitter_attention, places=places))
    model.config._attn_implementation = HEAVY_HITTERS
    try:
        yield {}
    finally:
        model.config._attn_implementation = before


def _heavy_hitter_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, places: int, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Token after token: queries [rows, heads, tokens, width], keys and values [rows, key heads, tokens, width]."""
    rows, key_heads, num_tokens = key.shape[:3]
    logits = scaling * (query.unflatten(1, (key_heads, -1)) @ key[:, :, None].transpose(-1, -2))
    kept = torch.zeros(rows, key_heads, num_tokens, dtype=torch.bool)
    scores = torch.zeros(rows, key_heads, num_tokens)
    outputs = []
    for i in range(num_tokens):
        kept[..., i] = True
        until = slice(0, i + 1)
        seen = logits[:, :, :, i, until].masked_fill(~kept[:, :, None, until], -torch.inf)
        weights = torch.softmax(seen, -1)
        outputs.append(weights @ value[:, :, until])
        scores[..., until] += weights.sum(2)
        if i >= places:
            old = slice(0, i + 1 - places // 2)
            least = scores[..., old].masked_fill(~kept[..., old], torch.inf).argmin(-1, keepdim=True)
            kept.scatter_(2, least, False)
    return torch.stack(outputs, 3).flatten(1, 2).transpose(1, 2), None
