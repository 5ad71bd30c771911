"""How far back the fine-tuning data needs attention to look, and how far back its gradient on attention reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.language.chains import ChainKind
from benchmarks.lab.training.data import DataKind, as_dataset, samples_for
from benchmarks.lab.training.plan import Training
from routeguard.demo.tasks import Sample
from routeguard.diagnostics.gradient import gradient_locality

NUM_SAMPLES = 64
REACH_FILE = "reach.jsonl"  # among the results


@dataclass(frozen=True)
class Span:
    """Distances in tokens, as quantiles of a distribution over distance.

    Attributes:
        half: half of it lies within this distance.
        most: nine tenths of it do.
    """

    half: int
    most: int


@dataclass(frozen=True)
class ReachOfData:
    """What fine-tuning data asks of attention, and what training on it tells attention.

    Attributes:
        look_ups: from the name that a step asks for back to where it was told.
        gradient: sizes of the loss gradient on the logits of full attention, by distance between query and key.
    """

    look_ups: Span
    gradient: Span


def look_up_distances(kind: ChainKind, sample: Sample) -> list[int]:
    """Tokens between each name that is asked for and the place where it was told."""
    told: dict[str, int] = {}
    found = []
    for at, word in enumerate(sample.words[:-1]):
        if word == kind.tell:
            told[sample.words[at + 1]] = at + 1
        elif word == kind.ask:
            found.append(at + 1 - told[sample.words[at + 1]])
    return found


def reach_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataKind, *, num_samples: int = NUM_SAMPLES
) -> ReachOfData:
    """Measure both on samples as fine-tuning has them, on the model before fine-tuning.

    Samples are cut to the length of the shortest, since the gradient is measured on sequences without padding.
    """
    samples = samples_for(data, num_samples=num_samples, num_words=Training().words, seed=0, replay=0.0, replayed=())
    rows = as_dataset(samples, tokenizer)
    shortest = min(map(len, rows["input_ids"]))
    input_ids, labels = (torch.tensor([row[:shortest] for row in rows[name]]) for name in ("input_ids", "labels"))
    curve = gradient_locality(model, input_ids, labels=labels, num_queries=None).pooled
    distances = [distance for sample in samples for distance in look_up_distances(data.chain, sample)]
    return ReachOfData(
        look_ups=span(np.bincount(distances)),
        gradient=span(curve.sums.sum(0)),  # sums over queries, not means: what the projections are moved by
    )


def span(weights: NDArray[Any]) -> Span:
    """Quantiles of a distribution given by its weight at each distance from 0 on."""
    shares = np.cumsum(weights) / np.sum(weights)
    half, most = (int(np.searchsorted(shares, share)) for share in (0.5, 0.9))
    return Span(half, most)
