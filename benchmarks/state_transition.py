"""What generation costs after conversion to state transition: memory of the cache and time a token, by length.

    python -m benchmarks.state_transition [--lengths 2048 8192 32768] [--threads 1]

A random Llama in memory writes steps of 64 tokens after a prompt of 256. The floor is the same model unconverted, with
the keys and values of as many tokens, one token at a time. All numbers are ratios to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.convert import add_state_transition

VOCABULARY, START, END = 1000, 1000, 1001
PROMPT_TOKENS, STEP_TOKENS = 256, 64
TIMED_TOKENS = 64


def build(positions: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def base_costs(model: Any, lengths: Sequence[int]) -> dict[int, tuple[float, int]]:
    """By length: seconds a token, and bytes of keys and values. The text is read in pieces of 1024."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    found: dict[int, tuple[float, int]] = {}
    held = 0
    for length in lengths:
        while held < length:
            piece = min(1024, length - held)
            model(torch.randint(0, VOCABULARY, (1, piece)), past_key_values=cache, logits_to_keep=1)
            held += piece
        began = time.perf_counter()
        for _ in range(TIMED_TOKENS):
            model(torch.randint(0, VOCABULARY, (1, 1)), past_key_values=cache)
        held += TIMED_TOKENS
        seconds = (time.perf_counter() - began) / TIMED_TOKENS
        found[length] = seconds, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return found


@torch.no_grad()
def our_costs(model: Any, lengths: Sequence[int]) -> dict[int, tuple[float, int, int]]:
    """By length: seconds a token over the last step, bytes of keys and values at most, bytes of states."""
    config = StateTransitionConfig(start_token_ids=(START,), end_token_id=END)
    transition = add_state_transition(model, config)
    for path in transition.paths.values():
        torch.nn.init.ones_(path.multiplier)
    cache = transition.new_cache()
    model(torch.randint(0, VOCABULARY, (1, PROMPT_TOKENS)), past_key_values=cache, logits_to_keep=1)
    found: dict[int, tuple[float, int, int]] = {}
    began, largest = time.perf_counter(), 0
    for place in range(max(lengths) - PROMPT_TOKENS):
        turn = place % STEP_TOKENS
        if turn == 0:
            began, largest = time.perf_counter(), 0
        token = START if turn == 0 else END if turn == STEP_TOKENS - 1 else place % VOCABULARY
        model(torch.tensor([[token]]), past_key_values=cache)
        largest = max(largest, cache.kv_bytes)
        length = place + 1 + PROMPT_TOKENS
        if turn == STEP_TOKENS - 1:
            near = [n for n in lengths if n not in found and length > n - STEP_TOKENS]
            for n in near:
                found[n] = (time.perf_counter() - began) / STEP_TOKENS, largest, cache.state_bytes
    transition.remove()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_transition", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    lengths = sorted(arguments.lengths)
    model = build(lengths[-1] + 1024)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"state transition, {size / 1e6:.0f}M parameters, prompt {PROMPT_TOKENS}, steps of {STEP_TOKENS} tokens; "
        "ratios to the unconverted model at the same length"
    )
    base = base_costs(model, lengths)
    ours = our_costs(model, lengths)
    print(
        f"{'tokens':>8}  {'time a token':>12}  {'keys, values':>12}  {'with states':>12}  (base: seconds a token, MiB)"
    )
    for n in lengths:
        seconds, kv, states = ours[n]
        base_seconds, base_kv = base[n]
        print(
            f"{n:>8}  {seconds / base_seconds:>12.2f}  {kv / base_kv:>12.4f}  {(kv + states) / base_kv:>12.4f}  "
            f"({base_seconds * 1e3:.1f} ms, {base_kv / 2**20:.0f} MiB)"
        )


if __name__ == "__main__":
    main()
