"""Pretrain a small model on all needle kinds and on both chains, as quickly as a CPU allows.

What makes so small a model learn recall so fast: several needles and several questions in each sequence, loss on the
answers only, and a curriculum (few needles without filler, then more of both, then longer).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.language.chains import PRETRAINED_CHAINS, chain_sample
from benchmarks.lab.language.needles import NEEDLE_KINDS, needle_sample
from benchmarks.lab.models.architectures import Architecture
from benchmarks.lab.pretrain_tiny_hybrid import loss_on
from routeguard.demo.tasks import Sample

CHAIN_WORDS = 95
REPORT_EVERY = 200

Report = Callable[[int, float, PreTrainedModel], None]


def needle_batch(progress: float, rng: random.Random) -> list[Sample]:
    """Samples of one length and of all kinds, for a point in the curriculum (`progress` from 0 to 1)."""
    if progress < 0.2:
        num_needles, most_filler = rng.choice([2, 3, 4]), 7
    elif progress < 0.5:
        num_needles, most_filler = rng.choice([2, 4, 6, 8]), 63
    else:
        num_needles, most_filler = rng.choice([2, 4, 6, 8]), 191
    kinds = list(NEEDLE_KINDS.values())
    num_words = 2 * max(kind.num_words for kind in kinds) * num_needles + rng.randint(0, most_filler)
    num_samples = 24 if num_words < 160 else 12
    return [needle_sample(kinds[i % len(kinds)], num_words, num_needles, rng) for i in range(num_samples)]


def chain_batch(rng: random.Random) -> list[Sample]:
    """Chains as pretraining shows them: three quarters of the table, look-ups at any distance."""
    kinds = PRETRAINED_CHAINS
    return [chain_sample(kinds[i % len(kinds)], CHAIN_WORDS, rng, cells="known", reach="any") for i in range(12)]


def pretrain(
    architecture: Architecture,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    steps: int,
    report: Report,
) -> PreTrainedModel:
    """Make a model from nothing. `report` is called with (step, loss, model) every 200 steps and at the end."""
    rng = random.Random(f"pretrain {seed}")
    model = architecture.untrained(seed)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=architecture.pretrain_rate, weight_decay=0.01, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 50) * max(0.03, 1 - s / steps))
    for step in range(steps):
        loss = loss_on(model, tokenizer, needle_batch(step / steps, rng))
        loss = loss + loss_on(model, tokenizer, chain_batch(rng))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps - 1:
            report(step, float(loss.detach()), model)
    return model
