"""Cost of mean attention distance in a layer, as a ratio to that layer's own attention.

    python -m benchmarks.attention_distance                 # CPU, 1 thread
    python -m benchmarks.attention_distance --device cuda   # events

Floors: the attention function alone (fused causal attention, no projections), and the whole attention block
(projections, norms, rotary embedding, attention) of a Qwen3 layer of the same size. Target: at most 0.15 of the former.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._timing import interleaved
from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.diagnostics.attention_rows import CHUNK_TOKENS, mean_distances
from routeguard.diagnostics.distance import NUM_QUERIES
from routeguard.diagnostics.query_sample import sample_queries

FUNCTION, BLOCK, DISTANCE = "attention function (floor)", "whole attention block", "mean distance"
TARGET = 0.15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def call_of(heads: int, key_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: str) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> Tensor:
        return torch.randn(1, count, tokens, head_dim, generator=generator).to(device, dtype)

    query, key, value = random(heads), random(key_heads), random(key_heads)
    return AttentionCall(0, "", query, key, value, scaling=head_dim**-0.5)


def attention_block(call: AttentionCall) -> Callable[[], object]:
    """A Qwen3 attention block of the geometry of `call`, hidden size heads × head_dim."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

    width = call.num_heads * call.query.shape[-1]
    config = Qwen3Config(
        hidden_size=width,
        num_attention_heads=call.num_heads,
        num_key_value_heads=call.key.shape[1],
        head_dim=call.query.shape[-1],
        num_hidden_layers=1,
        max_position_embeddings=call.num_keys,
        attn_implementation="sdpa",
    )
    block = Qwen3Attention(config, 0).to(call.query.device, call.query.dtype).eval()
    hidden = torch.randn(1, call.num_keys, width, device=call.query.device, dtype=call.query.dtype)
    rotary = Qwen3RotaryEmbedding(config).to(call.query.device)
    positions = rotary(hidden, torch.arange(call.num_keys, device=call.query.device)[None])
    return lambda: block(hidden, position_embeddings=positions, attention_mask=None)


@torch.no_grad()
def run(arguments: argparse.Namespace) -> None:
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
    for name in arguments.dtypes:
        for tokens in arguments.tokens:
            call = call_of(
                arguments.heads, arguments.key_heads, arguments.head_dim, tokens, DTYPES[name], arguments.device
            )
            positions = sample_queries(tokens, arguments.queries).all_positions
            group = arguments.heads // arguments.key_heads
            keys, values = (x.repeat_interleave(group, dim=1) for x in (call.key, call.value))
            functions: dict[str, Callable[[], object]] = {
                FUNCTION: lambda q=call.query, k=keys, v=values: functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True
                ),
                BLOCK: attention_block(call),
                DISTANCE: lambda c=call, p=positions: mean_distances(c, p, chunk_tokens=arguments.chunk),
            }
            timings = interleaved(
                functions, rounds=arguments.rounds, warmup=1, device=arguments.device, clock=arguments.clock
            )
            ratio, (low, high) = timings.ratio(DISTANCE, FUNCTION), timings.spread(DISTANCE, FUNCTION)
            verdict = "met" if ratio <= TARGET else "MISSED"
            print(
                f"  {name:<9} {tokens:>6} tokens  {ratio:.3f} of the attention function "
                f"(middle half {low:.3f} to {high:.3f}; target {TARGET}: {verdict}), "
                f"{timings.ratio(DISTANCE, BLOCK):.3f} of the whole block"
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_distance", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--queries", type=int, default=NUM_QUERIES)
    parser.add_argument("--chunk", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="cpu", help="cpu: for one thread on a busy machine")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.attention_distance --device cuda: skipped, there is no CUDA device here")
        return
    print(
        f"attention distance: {arguments.queries} queries, {arguments.heads} heads over {arguments.key_heads} key "
        f"heads of {arguments.head_dim} (median of the rounds' ratios)"
    )
    run(arguments)


if __name__ == "__main__":
    main()
