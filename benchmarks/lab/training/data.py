"""Fine-tuning data: chains, with needles mixed in where a condition replays them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from benchmarks.lab.language.chains import RULES, SHUFFLES, SUMS, ChainKind, chain_sample
from benchmarks.lab.language.needles import NEEDLE_KINDS, most_needles, needle_sample
from routeguard.demo.tasks import Reach, Sample


@dataclass(frozen=True)
class DataKind:
    """What a model is fine-tuned on.

    Attributes:
        name: as on the command line and in results.
        title: as in tables.
        chain: the chain; fine-tuning shows the whole of its table.
        reach: "previous" for chain of thought, "any" for the instruction control.
    """

    name: str
    title: str
    chain: ChainKind
    reach: Reach


DATA_KINDS = {
    kind.name: kind
    for kind in (
        DataKind("rules", "three tables (chain of thought)", RULES, "previous"),
        DataKind("sums", "running sums (chain of thought)", SUMS, "previous"),
        DataKind("cups", "shuffled cups (chain of thought)", SHUFFLES, "previous"),
        DataKind("instruction", "three tables, references at any distance (control)", RULES, "any"),
    )
}
MAIN_DATA = "rules"


def samples_for(
    data: DataKind, *, num_samples: int, num_words: int, seed: int, replay: float, replayed: Sequence[str]
) -> list[Sample]:
    """The samples of a run, in order.

    Args:
        data: what is learnt.
        num_samples: how many in all.
        num_words: most words of each.
        seed: of the data; a run with replay has the same chains as one without, less those that needles replace.
        replay: share of the samples that are needles, 0 to 1.
        replayed: names of their kinds, in turn.

    Raises:
        ValueError: a share that gives no sample, or replay without a kind.
    """
    rng = random.Random(f"chains {seed}")
    samples = [chain_sample(data.chain, num_words, rng, cells="all", reach=data.reach) for _ in range(num_samples)]
    if not replay:
        return samples
    count, kinds = round(replay * num_samples), [NEEDLE_KINDS[name] for name in replayed]
    if not count or not kinds:
        raise ValueError(f"replay={replay} of {num_samples} samples of the kinds {list(replayed)} is no sample at all")
    rng = random.Random(f"replay {seed}")
    most = most_needles(kinds, num_words)
    for i, place in enumerate(rng.sample(range(num_samples), count)):
        samples[place] = needle_sample(kinds[i % len(kinds)], num_words, rng.randint(min(2, most), most), rng)
    return samples


def as_dataset(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Columns `input_ids` and `labels`, which `SFTTrainer` takes as they are; words that do not count are -100."""
    input_ids: list[list[int]] = tokenizer([sample.text for sample in samples])["input_ids"]
    labels = [
        [token if counts else -100 for token, counts in zip(ids, (False, *sample.in_loss), strict=True)]
        for ids, sample in zip(input_ids, samples, strict=True)
    ]
    return Dataset.from_dict({"input_ids": input_ids, "labels": labels})
