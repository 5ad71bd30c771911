"""Have a model answer samples: teacher-forced in one forward pass, or generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from routeguard.recall.logits import last_logits
from routeguard.recall.sample import Sample
from routeguard.recall.scores import SampleScore, score_answers

Method = Literal["forced", "generated"]


@torch.no_grad()
def answer_forced(
    model: Any, tokenizer: Any, samples: Sequence[Sample], *, prefill_tokens: int | None = None
) -> list[SampleScore]:
    """Score samples whose prompts have one length, in one forward pass that keeps the answers' logits only.

    A value is right when each of its tokens is ranked first, given the true answer before it (and the blank before
    it, where that is a token of its own): greedy decoding would go on with it.
    Where several values are asked for, they are expected in the order of the reference answer.

    Args:
        model: in evaluation mode.
        tokenizer: to show what was predicted.
        samples: a batch; `[rows, tokens]` ids stay free of padding but for the ends of shorter answers, which no
            earlier position of a causal model can see.
        prefill_tokens: read the prompt in pieces of this size.
    """
    longest = max(len(sample.answer_ids) for sample in samples)
    rows = [
        (*sample.prompt_ids, *sample.answer_ids, *[sample.answer_ids[-1]] * (longest - len(sample.answer_ids)))
        for sample in samples
    ]
    input_ids = torch.tensor(rows, device=_device(model))
    logits = last_logits(model, input_ids, longest + 1, prefill_tokens=prefill_tokens)[:, :-1]
    predicted = logits.argmax(-1).cpu()
    targets = input_ids[:, -longest:]
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu()
    return [
        _score_forced(tokenizer, sample, predicted[i], targets[i].cpu(), nats[i]) for i, sample in enumerate(samples)
    ]


def _score_forced(tokenizer: Any, sample: Sample, predicted: Tensor, target: Tensor, nats: Tensor) -> SampleScore:
    hits = predicted == target
    of_values = torch.zeros(len(target), dtype=torch.bool)
    for start, stop in sample.spans:
        of_values[start:stop] = True
    return score_answers(
        sample,
        [_decode(tokenizer, predicted[start:stop].tolist()) for start, stop in sample.spans],
        [bool(hits[start:stop].all()) for start, stop in sample.spans],
        token_accuracy=float(hits[of_values].float().mean()),
        nll=float(nats[of_values].mean()),
    )


@torch.no_grad()
def answer_generated(
    model: Any, tokenizer: Any, samples: Sequence[Sample], *, max_new_tokens: int | None = None
) -> list[SampleScore]:
    """Score samples whose prompts have one length by greedy decoding; a value is right when it occurs in the answer.

    Args:
        model: in evaluation mode, with a `generate`.
        tokenizer: to read what was written.
        samples: a batch.
        max_new_tokens: length of the answer; None: the samples' room for it.
    """
    from transformers import GenerationConfig

    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stop = tokenizer.eos_token_id if stop is None else stop
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    input_ids = torch.tensor([sample.prompt_ids for sample in samples], device=_device(model))
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens or max(sample.reserve_tokens for sample in samples),
        eos_token_id=stop,
        pad_token_id=0 if padding is None else padding,
    )
    written = model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    texts = [_decode(tokenizer, row.tolist()) for row in written[:, input_ids.shape[1] :]]
    return [score_answers(sample, [text] * len(sample.values)) for sample, text in zip(samples, texts, strict=True)]


def refuse_without_generation(model: Any) -> None:
    """Raise ValueError for a model that cannot write."""
    able = getattr(model, "can_generate", None)
    if not hasattr(model, "generate") or (callable(able) and not able()):
        raise ValueError(
            f"{type(model).__name__} cannot generate; use method='forced', which needs one forward pass only"
        )


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()
