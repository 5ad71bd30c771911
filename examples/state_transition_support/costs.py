"""What reading a text token by token costs: bytes that are held, and processor time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """Of one text, read through a cache.

    Attributes:
        kv_bytes: keys and values of the layers asked for, at most.
        state_bytes: states beside them; 0 for caches without.
        ms_per_token: milliseconds of processor time, the mean over the last tokens. With one thread, waiting for a
            busy machine does not count.
        best: [tokens], the most probable next token after each.
    """

    kv_bytes: int
    state_bytes: int
    ms_per_token: float
    best: Tensor


@torch.no_grad()
def reading_cost(model: Any, cache: Any, ids: Tensor, *, layers: tuple[int, ...], prompt: int, timed: int) -> Cost:
    """Read `ids` [1, tokens]: the first `prompt` at once, then one by one; the last `timed` are timed.

    Args:
        model: whatever reads.
        cache: empty; `state_bytes` of it counts where it has that.
        layers: whose keys and values count.
    """
    best = [model(ids[:, :prompt], past_key_values=cache, use_cache=True).logits[0].argmax(-1)]
    kv_bytes = state_bytes = 0
    seconds = 0.0
    for i in range(prompt, ids.shape[1]):
        began = time.process_time()
        logits = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits
        if i >= ids.shape[1] - timed:
            seconds += time.process_time() - began
        best.append(logits[0].argmax(-1))
        held = [cache.layers[layer] for layer in layers]
        kv_bytes = max(kv_bytes, sum(one.keys.nbytes + one.values.nbytes for one in held))
        state_bytes = max(state_bytes, getattr(cache, "state_bytes", 0))
    return Cost(kv_bytes, state_bytes, 1e3 * seconds / timed, torch.cat(best))
