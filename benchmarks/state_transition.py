"""What generation costs after conversion to state transition: memory of the cache and time a token, by length.

    python -m benchmarks.state_transition [--lengths 2048 8192 32768] [--threads 1]

A random Llama in memory has a prompt of 256 tokens and steps of 64. The floor is the same model unconverted, with keys
and values of as many tokens. Timed are whole steps, token by token, both models in turn. What was before is not
generated: our cache reads its steps in pieces, and the base's is filled with random keys and values, which cost what
others would. With one thread, times are processor time, so that a busy machine counts for less. All numbers are ratios
to the floor.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks._timing import interleaved
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.convert import StateTransition, add_state_transition

VOCABULARY, START, END = 1000, 1000, 1001
PROMPT_TOKENS, STEP_TOKENS = 256, 64
PIECE_STEPS = 16  # that are read at once, on the way to a length
ROUNDS, WARMUP = 3, 1


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


def convert(model: Any) -> StateTransition:
    """A converted copy, whose paths add something."""
    config = StateTransitionConfig(start_token_ids=(START,), end_token_id=END)
    transition = add_state_transition(copy.deepcopy(model), config)
    for path in transition.paths.values():
        torch.nn.init.ones_(path.multiplier)
    return transition


def filled(config: Any, length: int) -> Any:
    """A cache of the base model with random keys and values of `length` tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, 1, config.num_key_value_heads, length, config.head_dim).unbind()
        cache.update(keys, values, layer)
    return cache


class Reader:
    """A model with its cache, which reads whole steps token by token; notes the most bytes that the cache held."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache, self.kv_bytes = model, cache, 0

    def step(self, *, marked: bool) -> None:
        for token in step_tokens() if marked else random_tokens(STEP_TOKENS):
            self.model(torch.tensor([[token]]), past_key_values=self.cache)
            self.kv_bytes = max(self.kv_bytes, sum(one.keys.nbytes + one.values.nbytes for one in self.cache.layers))


def random_tokens(count: int) -> list[int]:
    return [int(token) for token in torch.randint(0, VOCABULARY, (count,))]


def step_tokens() -> list[int]:
    return [START, *random_tokens(STEP_TOKENS - 2), END]


@dataclass(frozen=True)
class Costs:
    """At one length: ours by the base's for time and bytes, and what the base costs itself."""

    time: float
    kv: float
    kv_and_states: float
    base_seconds: float
    base_bytes: int


@torch.no_grad()
def measure(model: Any, lengths: Sequence[int], *, threads: int) -> dict[int, Costs]:
    """Costs by length, shortest first."""
    transition = convert(model)
    ours = Reader(transition.model, transition.new_cache())
    ours.model(torch.tensor([random_tokens(PROMPT_TOKENS)]), past_key_values=ours.cache, logits_to_keep=1)
    held, timed = PROMPT_TOKENS, (ROUNDS + WARMUP) * STEP_TOKENS
    found: dict[int, Costs] = {}
    for length in lengths:
        while (steps := min(PIECE_STEPS, (length - timed - held) // STEP_TOKENS)) > 0:
            piece = [token for _ in range(steps) for token in step_tokens()]
            ours.model(torch.tensor([piece]), past_key_values=ours.cache, logits_to_keep=1)
            held += len(piece)
        base = Reader(model, filled(model.config, length - timed))
        timings = interleaved(
            {"ours": lambda: ours.step(marked=True), "base": lambda base=base: base.step(marked=False)},  # type: ignore[misc]
            rounds=ROUNDS,
            warmup=WARMUP,
            clock="cpu" if threads == 1 else "wall",
        )
        held += timed
        found[length] = Costs(
            time=timings.ratio("ours", "base"),
            kv=ours.kv_bytes / base.kv_bytes,
            kv_and_states=(ours.kv_bytes + ours.cache.state_bytes) / base.kv_bytes,
            base_seconds=timings.median("base") / STEP_TOKENS,
            base_bytes=base.kv_bytes,
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_transition", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    shortest = PROMPT_TOKENS + (ROUNDS + WARMUP + 1) * STEP_TOKENS
    if min(arguments.lengths) < shortest:
        parser.error(f"--lengths must be {shortest} at least: prompt, and the steps that are timed")
    torch.set_num_threads(arguments.threads)
    lengths = sorted(arguments.lengths)
    model = build(lengths[-1] + 1024)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"state transition, {size / 1e6:.0f}M parameters, prompt {PROMPT_TOKENS}, steps of {STEP_TOKENS} tokens; "
        "ratios to the unconverted model at the same length"
    )
    print(
        f"{'tokens':>8}  {'time a token':>12}  {'keys, values':>12}  {'with states':>12}  (base: time a token, MiB)",
        flush=True,
    )
    for length, costs in measure(model, lengths, threads=arguments.threads).items():
        print(
            f"{length:>8}  {costs.time:>12.2f}  {costs.kv:>12.4f}  {costs.kv_and_states:>12.4f}  "
            f"({costs.base_seconds * 1e3:.1f} ms, {costs.base_bytes / 2**20:.0f} MiB)"
        )


if __name__ == "__main__":
    main()
