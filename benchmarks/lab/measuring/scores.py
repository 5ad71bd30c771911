"""Score a model on the lab's skills: recall by needle kind and context length, and chains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.language.chains import ChainKind, chain_sample, steps_in
from benchmarks.lab.language.needles import NeedleKind, needle_sample
from routeguard.demo.evaluate import encode, right_next_token
from routeguard.demo.tasks import Reach

NUM_NEEDLES = 6
CHAIN_WORDS = 159


@dataclass(frozen=True)
class Reasoning:
    """Shares of right results in chains, 0 to 1.

    Attributes:
        new: chain of thought, cells of the table that pretraining never showed: what fine-tuning teaches.
        known: chain of thought, cells that pretraining showed.
        far: known cells, but a step may look up any earlier variable, as in pretraining: what can be forgotten.
    """

    new: float
    known: float
    far: float


def recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: NeedleKind,
    num_tokens: int,
    *,
    num_samples: int,
    seed: str,
) -> float:
    """Share of right answer words to six questions in contexts of `num_tokens` tokens, the true text before each."""
    rng = random.Random(f"recall {seed} {kind.name} {num_tokens}")
    samples = [needle_sample(kind, num_tokens - 1, NUM_NEEDLES, rng) for _ in range(num_samples)]
    input_ids, in_loss = encode(samples, tokenizer)
    return float(right_next_token(model, input_ids)[in_loss[:, 1:]].float().mean())


def reasoning(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: ChainKind, *, num_samples: int, seed: str
) -> Reasoning:
    """Accuracy of the word after `=` in fresh chains, the true text before each."""

    def accuracy(reach: Reach) -> dict[bool, list[bool]]:
        rng = random.Random(f"reasoning {seed} {kind.name} {reach}")
        samples = [chain_sample(kind, CHAIN_WORDS, rng, cells="all", reach=reach) for _ in range(num_samples)]
        hits = right_next_token(model, encode(samples, tokenizer)[0])
        found: dict[bool, list[bool]] = {True: [], False: []}
        for row, sample in zip(hits, samples, strict=True):
            for position, value, operation in steps_in(kind, sample):
                # hits[i] is about token i + 1, and word i is token i + 1: the word after "=" is at position + 1.
                found[kind.is_known(value, operation)].append(bool(row[position + 1]))
        return found

    chain, mixed = accuracy("previous"), accuracy("any")
    return Reasoning(new=_mean(chain[False]), known=_mean(chain[True]), far=_mean(mixed[True]))


def _mean(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")
