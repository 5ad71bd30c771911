"""Sampling of queries: what the estimate and its interval are worth, measured by sampling again and again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from routeguard.demo import tasks
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.diagnostics.distance import attention_distance
from routeguard.diagnostics.query_sample import mean_interval, sample_queries, t_quantile

SEEDS = 300


def coverage(values: Tensor, num_queries: int, *, shrink: float = 1.0) -> Tensor:
    """Share of seeds whose interval (its half-width times `shrink`) holds the mean over all queries, for each row."""
    truth = values.double().mean(-1)
    hits = torch.zeros(values.shape[0])
    for seed in range(SEEDS):
        sample = sample_queries(values.shape[1], num_queries, seed=seed)
        found = mean_interval(values[:, sample.all_positions], sample)
        hits += ((found.mean - truth).abs() <= shrink * (found.high - found.low) / 2 + 1e-9).float()
    return hits / SEEDS


@pytest.fixture(scope="module")
def heads() -> Tensor:
    """Distances of every query of the eight full-attention heads of the demo's hybrid, 512 tokens of needles."""
    ids = load_tokenizer()([tasks.needle_sample(511, 6, random.Random(0)).text])["input_ids"]
    measured = attention_distance(load_model(), torch.tensor(ids), num_queries=None)
    return torch.cat(list(measured.values.values()))


def test_intervals_of_real_heads_hold_the_mean_as_often_as_they_say(heads: Tensor) -> None:
    measured = coverage(heads, 64)
    assert float(measured.mean()) >= 0.93
    assert float(measured.min()) >= 0.88
    assert float(coverage(heads, 64, shrink=0.5).mean()) < 0.85  # a narrower one would not


def test_heads_that_rarely_look_far_are_the_hard_case() -> None:
    generator = torch.Generator().manual_seed(0)
    far = torch.arange(1024.0) * torch.rand(4, 1024, generator=generator)
    values = torch.where(torch.rand(4, 1024, generator=generator) < 0.05, far, torch.tensor(3.0))
    few, many = (float(coverage(values, n).mean()) for n in (16, 128))
    assert few < 0.7 < 0.9 < many  # what the documentation warns of


def test_the_estimate_is_unbiased(heads: Tensor) -> None:
    estimates = []
    for seed in range(SEEDS):
        sample = sample_queries(heads.shape[1], 32, seed=seed)
        estimates.append(mean_interval(heads[:, sample.all_positions], sample).mean)
    stacked = torch.stack(estimates)
    error = (stacked.mean(0) - heads.double().mean(-1)).abs()
    assert bool((error < 4 * stacked.std(0) / SEEDS**0.5).all())


def test_samples_are_spread_repeatable_and_complete_when_they_can_be() -> None:
    sample = sample_queries(1000, 64, seed=3)
    assert sample == sample_queries(1000, 64, seed=3) != sample_queries(1000, 64, seed=4)
    positions = sample.all_positions
    assert positions == sorted(set(positions)) and len(positions) == 64 and not sample.complete
    assert all(
        start <= p < stop for (start, stop), drawn in zip(sample.strata, sample.positions, strict=True) for p in drawn
    )
    assert sample.strata[0][0] == 0 and sample.strata[-1][1] == 1000
    assert sample_queries(20, 64).complete and sample_queries(20, None).all_positions == list(range(20))
    assert len(sample_queries(33, 32).all_positions) == 32
    with pytest.raises(ValueError, match="8 or more"):
        sample_queries(100, 7)


def test_t_quantiles() -> None:
    found = t_quantile(torch.tensor([3.0, 5.0, 10.0, float("inf")]).double(), 0.95)
    torch.testing.assert_close(found, torch.tensor([3.182, 2.571, 2.228, 1.960]).double(), rtol=0.01, atol=0)
