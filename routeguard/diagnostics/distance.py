"""Mean attention distance of every head of the full-attention layers, from a sample of queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.diagnostics.attention_rows import CHUNK_TOKENS, mean_distances
from routeguard.diagnostics.capture import captured_calls
from routeguard.diagnostics.query_sample import Interval, QuerySample, mean_interval, sample_queries
from routeguard.diagnostics.running import (
    chosen_attention,
    over_tokens,
    quiet,
    require_seen,
    run_tokens,
)
from routeguard.recall.model_config import refuse_beyond_positions
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
NUM_QUERIES = 64


@dataclass(frozen=True, eq=False)
class AttentionDistance:
    """Mean attention distance by layer and head.

    Attributes:
        values: for each layer [heads, sampled queries], tokens, averaged over the sequences.
        sample: which queries, the same in every layer and sequence.
        num_sequences: sequences measured together.
        confidence: of the intervals.
    """

    values: Mapping[int, Tensor]
    sample: QuerySample
    num_sequences: int
    confidence: float = 0.95

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.values)

    def interval(self, layer: int) -> Interval:
        """Mean distance of each head of a layer over all queries, with its interval: tensors [heads], tokens.

        The interval is about the sampling of queries, not of texts.
        """
        if layer not in self.values:
            raise ValueError(f"layer {layer} was not measured; measured: {list(self.values)}")
        return mean_interval(self.values[layer], self.sample, confidence=self.confidence)

    def mean(self, layer: int) -> tuple[float, ...]:
        """Mean distance of each head of a layer, tokens."""
        return tuple(self.interval(layer).mean.tolist())

    def to_dict(self) -> dict[str, Any]:
        intervals = {layer: self.interval(layer) for layer in self.values}
        return {
            "schema_version": SCHEMA_VERSION,
            "num_tokens": self.sample.num_tokens,
            "num_sequences": self.num_sequences,
            "num_queries": len(self.sample.all_positions),
            "confidence": self.confidence,
            "layers": {
                str(layer): {"mean": found.mean.tolist(), "low": found.low.tolist(), "high": found.high.tolist()}
                for layer, found in intervals.items()
            },
        }

    def __str__(self) -> str:
        lines = [_heading(self)]
        for layer in self.values:
            found = self.interval(layer)
            half = (found.high - found.low) / 2
            heads = "  ".join(f"{mean:.0f}±{width:.0f}" for mean, width in zip(found.mean, half, strict=True))
            lines.append(f"layer {layer:>3}  mean {float(found.mean.mean()):.0f}  heads {heads}")
        return "\n".join(lines)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """Heads of each layer with their intervals; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.diagnostics.distance_plot import plot_distances

        return plot_distances({"": self}, path)


def attention_distance(
    model: nn.Module,
    input_ids: Tensor,
    *,
    layers: Iterable[int] | None = None,
    num_queries: int | None = NUM_QUERIES,
    seed: int = 0,
    confidence: float = 0.95,
    chunk_tokens: int = CHUNK_TOKENS,
    insist: bool = False,
) -> AttentionDistance:
    """Measure how far back each head of the full-attention layers looks: `D = (1/T)·Σ_t Σ_{s≤t} A[t,s]·(t−s)`.

    The queries and keys are those that the model hands to its attention function (eager, SDPA or flash), so its
    scaling, rotary embedding, norms, soft cap, sinks, masks and grouped heads are in. Memory is O(heads · num_queries
    · chunk_tokens). The model runs in evaluation mode and is left as it was.

    Args:
        model: a causal language model.
        input_ids: [sequences, tokens], no padding. More sequences: smaller differences between texts.
        layers: decoder layer indices. Default: every full-attention layer.
        num_queries: queries computed in each sequence, 8 or more, default 64; None: all (cost and memory of T × T).
        seed: which queries; the same for two models makes them comparable in pairs.
        confidence: of the intervals, default 0.95.
        chunk_tokens: keys at a time.
        insist: measure beyond the positions that the model's configuration names.

    Raises:
        ValueError: no full-attention layer, a layer whose attention cannot be seen, padded input, or more tokens than
            the model has positions.

    Source: paper, mean attention distance; sampling and chunking derived.
    """
    if not insist:
        refuse_beyond_positions(model, int(input_ids.shape[-1]))
    sample = sample_queries(int(input_ids.shape[-1]), num_queries, seed=seed)
    positions = sample.all_positions
    found: dict[int, dict[str, list[Tensor]]] = {}

    def visit(call: AttentionCall, _: Tensor | None) -> None:
        if over_tokens(call, sample.num_tokens):
            distances = mean_distances(call, positions, chunk_tokens=chunk_tokens)
            found.setdefault(call.layer, {}).setdefault(call.module, []).append(distances.mean(0).cpu())

    attention = chosen_attention(model, layers)
    with torch.no_grad(), quiet(model), captured_calls(model, attention, visit):
        run_tokens(model, input_ids)
    require_seen((geometry.layer for geometry in attention), found)
    # A module that runs several times in a pass (looped models) counts with the mean of its runs; two modules of one
    # layer are a layer of all their heads.
    values = {
        layer: torch.cat([torch.stack(runs).mean(0) for runs in found[layer].values()]) for layer in sorted(found)
    }
    return AttentionDistance(values, sample, int(input_ids.shape[0]), confidence)


def _heading(result: AttentionDistance) -> str:
    sample = result.sample
    queries = "all queries" if sample.complete else f"{len(sample.all_positions)} queries"
    return (
        f"mean attention distance in tokens, {result.num_sequences} × {sample.num_tokens} tokens, {queries} "
        f"({result.confidence:.0%} intervals over queries)"
    )
