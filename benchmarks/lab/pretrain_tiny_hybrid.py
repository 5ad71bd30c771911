"""Pretrain the demo's tiny hybrid from nothing and write the folder that ships with the package.

    python benchmarks/lab/pretrain_tiny_hybrid.py [--output routeguard/demo/weights] [--steps 2400] [--seed 0]

Takes about six minutes on one CPU core. What makes so small a model learn recall so fast: several needles and several
questions in each sequence, loss on the answers only, and a curriculum (few needles without filler, then more of both).
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from routeguard.demo import evaluate, tasks
from routeguard.demo.model import WEIGHTS, build_model, build_tokenizer

LEARNING_RATE = 3e-3
SUM_WEIGHT = 0.5


def needle_batch(progress: float, rng: random.Random) -> list[tasks.Sample]:
    """Samples of one length for a point in the curriculum (`progress` from 0 to 1)."""
    if progress < 0.25:
        num_needles, most_filler = rng.choice([2, 3, 4]), 7
    elif progress < 0.6:
        num_needles, most_filler = rng.choice([2, 4, 6, 8]), 63
    else:
        num_needles, most_filler = rng.choice([2, 4, 6, 8]), 191
    num_words = 8 * num_needles + rng.randint(0, most_filler)
    return [tasks.needle_sample(num_words, num_needles, rng) for _ in range(24 if num_words < 160 else 12)]


def sum_batch(rng: random.Random) -> list[tasks.Sample]:
    """Running sums as pretraining shows them: 75 % of the table, look-ups at any distance."""
    return [tasks.sum_sample(95, rng, sums="known", reach="any") for _ in range(8)]


def loss_on(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: list[tasks.Sample]) -> torch.Tensor:
    """Mean cross-entropy over the words that count."""
    input_ids, in_loss = evaluate.encode(samples, tokenizer)
    logits = model(input_ids, use_cache=False).logits[:, :-1]
    counted = in_loss[:, 1:]
    return cross_entropy(logits[counted].float(), input_ids[:, 1:][counted])


def pretrain(output: Path, *, steps: int, seed: int) -> None:
    """Train, report every 200 steps, and save model and tokenizer to `output`."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rng = random.Random(seed + 1)
    tokenizer = build_tokenizer()
    model = build_model(seed=seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 50) * max(0.03, 1 - s / steps))
    began = time.perf_counter()
    for step in range(steps):
        loss = loss_on(model, tokenizer, needle_batch(step / steps, rng))
        loss = loss + SUM_WEIGHT * loss_on(model, tokenizer, sum_batch(rng))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == steps - 1:
            scores = {n: round(evaluate.recall(model, tokenizer, n), 3) for n in evaluate.RECALL_LENGTHS}
            print(
                f"step {step}  loss {loss.item():.3f}  recall {scores}  {evaluate.reasoning(model, tokenizer)}"
                f"  {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    weights = output / "model.safetensors"
    weights.chmod(0o644)  # saved readable by its owner only, which a wheel would keep
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    print(f"{model.num_parameters():,} parameters in {output}, model.safetensors sha256 {digest}")


def main() -> None:
    """Read the command line and pretrain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pretrain(options.output, steps=options.steps, seed=options.seed)


if __name__ == "__main__":
    main()
