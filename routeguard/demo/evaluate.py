"""Score a model on the demo's two skills: recall by context length, and running sums."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from routeguard.demo import tasks

RECALL_LENGTHS = (128, 256, 512, 1024)
_TOKENS_A_BATCH = 16384


@dataclass(frozen=True)
class Reasoning:
    """Shares of right answers in running sums, 0 to 1.

    Attributes:
        new_sums: chain of thought, the sums that pretraining never showed: what fine-tuning teaches.
        known_sums: chain of thought, the sums that pretraining showed.
        far_lookups: known sums, but a step may look up any earlier variable, as in pretraining: what can be forgotten.
    """

    new_sums: float
    known_sums: float
    far_lookups: float


def encode(samples: Sequence[tasks.Sample], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenize samples to `(input_ids, in_loss)`, both `[samples, longest + 1]`, right-padded; column 0 is `<s>`."""
    batch = tokenizer([sample.text for sample in samples], padding=True, padding_side="right", return_tensors="pt")
    input_ids: torch.Tensor = batch["input_ids"]
    in_loss = torch.zeros(input_ids.shape, dtype=torch.bool)
    for row, sample in zip(in_loss, samples, strict=True):
        row[1 : 1 + len(sample.in_loss)] = torch.tensor(sample.in_loss)
    return input_ids, in_loss


@torch.no_grad()
def right_next_token(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Say for each token but the first whether the model, reading the true text before it, ranks it first.

    Args:
        model: a causal language model; it is put in evaluation mode for the call and back.
        input_ids: `[samples, tokens]`, right-padded (padding does not reach the tokens before it).

    Returns:
        Booleans, `[samples, tokens - 1]`.
    """
    was_training = model.training
    model.eval()
    per_batch = max(1, _TOKENS_A_BATCH // input_ids.shape[1])
    hits = [model(ids).logits[:, :-1].argmax(-1) == ids[:, 1:] for ids in torch.split(input_ids, per_batch)]
    model.train(was_training)
    return torch.cat(hits)


def recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    *,
    num_needles: int = 6,
    num_samples: int = 48,
    seed: int = 99,
) -> float:
    """Mean digit accuracy over the answers to `num_needles` questions in contexts of `num_tokens` tokens (0 to 1)."""
    rng = random.Random(seed)
    samples = [tasks.needle_sample(num_tokens - 1, num_needles, rng) for _ in range(num_samples)]
    input_ids, in_loss = encode(samples, tokenizer)
    return float(right_next_token(model, input_ids)[in_loss[:, 1:]].float().mean())


def reasoning(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_tokens: int = 160,
    num_samples: int = 48,
    seed: int = 5,
) -> Reasoning:
    """Accuracy of the digit after `=` in fresh running sums of up to `num_tokens` tokens."""

    def accuracy(reach: tasks.Reach) -> dict[bool, list[bool]]:
        rng = random.Random(seed)
        samples = [tasks.sum_sample(num_tokens - 1, rng, sums="all", reach=reach) for _ in range(num_samples)]
        hits = right_next_token(model, encode(samples, tokenizer)[0])
        found: dict[bool, list[bool]] = {True: [], False: []}
        for row, sample in zip(hits, samples, strict=True):
            for position, left, right in tasks.sums_in(sample):
                # `hits[i]` is about token i + 1, and word i is token i + 1: the word after "=" is at `position + 1`.
                found[tasks.is_known_sum(left, right)].append(bool(row[position + 1]))
        return found

    chain, mixed = accuracy("previous"), accuracy("any")
    return Reasoning(new_sums=_mean(chain[False]), known_sums=_mean(chain[True]), far_lookups=_mean(mixed[True]))


def _mean(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")
