"""`measure_recall`: make samples, have a model answer them in batches, and count."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from routeguard.recall.answering import Method, answer_forced, answer_generated, refuse_without_generation
from routeguard.recall.checks import check_at_least_one, check_lengths
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import Haystack
from routeguard.recall.haystack_use import chosen_haystack, haystack_notes, haystack_origin
from routeguard.recall.journal import Journal, fingerprint
from routeguard.recall.model_config import refuse_beyond_positions
from routeguard.recall.prefill_trial import takes_prompts_in_pieces
from routeguard.recall.quiet import undisturbed
from routeguard.recall.registry import DEFAULT_TASKS, find_tasks
from routeguard.recall.result import RecallResult
from routeguard.recall.sample import Sample, build_sample
from routeguard.recall.scores import SampleScore
from routeguard.recall.task import Task
from routeguard.routes.in_memory import model_name

Progress = Callable[[int, int, float], None]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Plan:
    """Which samples there are: `num_samples` for each task and length, spread over the depths in turn."""

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    num_samples: int
    haystack: Haystack
    seed: int = 0
    reserve_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or self.num_samples < 1:
            raise ValueError(
                f"give lengths and a number of samples of at least 1; got {self.lengths}, {self.num_samples}"
            )
        if not self.depths or min(self.depths) < 0 or max(self.depths) > 1:
            raise ValueError(f"depths lie between 0 (the beginning) and 1 (the end); got {self.depths}")

    def cells(self) -> Iterator[tuple[Task, int]]:
        """Task and length of each cell, short ones first."""
        return ((task, length) for length, task in itertools.product(sorted(set(self.lengths)), self.tasks))

    def sample(self, encoder: Encoder, task: Task, length: int, index: int) -> Sample:
        """The sample with that number."""
        return build_sample(
            task,
            encoder,
            length_tokens=length,
            depth=self.depths[index % len(self.depths)],
            index=index,
            haystack=self.haystack,
            seed=self.seed,
            reserve_tokens=self.reserve_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "tasks": [task.name for task in self.tasks],
            "lengths": sorted(set(self.lengths)),
            "depths": list(self.depths),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "haystack": haystack_origin(self.haystack, self.tasks),
            "reserve_tokens": self.reserve_tokens,
        }


def measure_recall(
    model: Any,
    tokenizer: Any,
    *,
    tasks: str | Task | Iterable[str | Task] = DEFAULT_TASKS,
    lengths: Sequence[int] = (4096,),
    num_samples: int = 20,
    depths: Sequence[float] = DEPTHS,
    method: Method = "forced",
    chat: bool = False,
    haystack: Any = None,
    seed: int = 0,
    reserve_tokens: int | None = None,
    batch_tokens: int = 16384,
    prefill_tokens: int | None = None,
    insist: bool = False,
    resume: str | Path | None = None,
    progress: Progress | None = None,
) -> RecallResult:
    """Measure how well a model recalls what stands far back in its context.

    The model is put in evaluation mode for the call; it and all random states are left as they were.

    Args:
        model: a causal language model, with or without adapters.
        tokenizer: its tokenizer.
        tasks: RULER's needle tasks and variable tracking by name (`registry.TASKS`), `NAME+reasoning` for recall after
            a chain of thought, or tasks of your own.
        lengths: context lengths in tokens: prompt and room for the answer together.
        num_samples: samples for each task and length, spread over `depths`.
        depths: where the values stand: 0 the beginning of the context, 1 its end.
        method: "forced" (default): one forward pass, the true answer given; "generated": greedy decoding.
        chat: use the tokenizer's chat template; raw text by default.
        haystack: None (prose of Python's manual), a text, texts, or `(dataset, "column")`.
        seed: the same seed gives the same samples.
        reserve_tokens: room for the answer; None: as the task's answers need. RULER's own: 128, variable tracking 30.
        batch_tokens: most tokens in one forward pass; at least one sample always.
        prefill_tokens: read prompts in pieces of this many tokens to bound memory (forced only), where the model's
            cache allows it. That is tested on each task's first sample.
        insist: measure beyond the positions that the model's configuration names.
        resume: a file to which each score is appended; a call with the same model and settings goes on from it, as
            long as the samples have the same tokens.
        progress: called with samples done, samples in all, and the estimated seconds left.

    Raises ValueError for lengths beyond the model's positions, too short for the needles, or longer than the haystack;
    for a haystack that no task uses; for a tokenizer without the words; for a model that cannot generate or read in
    pieces where that is asked.
    """
    if method not in get_args(Method):
        raise ValueError(f"no method {method!r}; there are {', '.join(get_args(Method))}")
    if method == "generated":
        refuse_without_generation(model)
        if prefill_tokens is not None:
            raise ValueError("prefill_tokens works with method='forced' only")
    if prefill_tokens is not None:
        check_at_least_one("prefill_tokens", prefill_tokens)
    check_at_least_one("batch_tokens", batch_tokens)
    check_at_least_one("num_samples", num_samples)
    asked = find_tasks(tasks)
    text = chosen_haystack(haystack, asked)
    plan = Plan(asked, check_lengths(lengths), tuple(depths), num_samples, text, seed, reserve_tokens)
    encoder = Encoder(tokenizer, chat=chat)
    if not insist:
        refuse_beyond_positions(model, max(plan.lengths))
    settings = {**plan.to_dict(), "method": method, "chat": chat}
    for task, length in plan.cells():  # refusals before the first long forward pass, and before a file is begun
        plan.sample(encoder, task, length, 0)
    journal = None if resume is None else Journal(Path(resume), {**settings, "fingerprint": fingerprint(model)})
    settings["model"] = model_name(model) or type(model).__name__

    def answer(batch: list[Sample]) -> list[SampleScore]:
        if method == "generated":
            return answer_generated(model, tokenizer, batch)
        return answer_forced(model, tokenizer, batch, prefill_tokens=prefill_tokens)

    scores: list[SampleScore] = []
    clock = _Clock(plan, progress)
    with undisturbed(model):
        if prefill_tokens is not None:
            _refuse_unreadable_pieces(model, plan, encoder, prefill_tokens)
        for task, length in plan.cells():
            size = max(1, batch_tokens // length)
            waiting: list[Sample] = []
            for index in range(num_samples):
                sample = plan.sample(encoder, task, length, index)
                known = None if journal is None else journal.score_of(sample)
                if known is None:
                    waiting.append(sample)
                else:
                    scores.append(known)
                    clock.skip(length)
                if len(waiting) < size and (index < num_samples - 1 or not waiting):
                    continue
                new = answer(waiting)
                waiting = []
                scores += new
                if journal is not None:
                    journal.append(new)
                clock.did(length, len(new))
    order = {task.name: i for i, task in enumerate(plan.tasks)}
    scores.sort(key=lambda s: (order[s.task], s.length_tokens, s.index))
    return RecallResult(tuple(scores), settings, tuple(_notes(plan, method)))


class _Clock:
    """Tells progress, with an estimate in proportion to tokens."""

    def __init__(self, plan: Plan, progress: Progress | None) -> None:
        self.progress = progress
        self.total = self.tokens_left = 0
        for _, length in plan.cells():
            self.total += plan.num_samples
            self.tokens_left += length * plan.num_samples
        self.done = self.tokens_done = 0
        self.began = time.monotonic()

    def skip(self, length: int) -> None:
        self.done += 1
        self.tokens_left -= length

    def did(self, length: int, count: int) -> None:
        self.done += count
        self.tokens_left -= length * count
        self.tokens_done += length * count
        if self.progress is not None:
            seconds = (time.monotonic() - self.began) / self.tokens_done * self.tokens_left
            self.progress(self.done, self.total, seconds)


def _refuse_unreadable_pieces(model: Any, plan: Plan, encoder: Encoder, prefill_tokens: int) -> None:
    import torch

    longest = max(plan.lengths)
    if prefill_tokens >= longest:
        return  # every row is read at once
    device = next(model.parameters()).device
    for task in plan.tasks:
        sample = plan.sample(encoder, task, longest, 0)
        ids = (*sample.prompt_ids, *sample.answer_ids)[: 2 * prefill_tokens + 16]
        keep = min(8, len(ids) - 1)
        if not takes_prompts_in_pieces(model, torch.tensor([ids], device=device), keep, prefill_tokens):
            raise ValueError(
                f"{type(model).__name__} does not give the same answers when a prompt of {task.name} is read in pieces "
                f"of {prefill_tokens} tokens (its cache does not carry everything over); leave prefill_tokens out"
            )


def _notes(plan: Plan, method: Method) -> Iterator[str]:
    several = [t.name for t in plan.tasks if getattr(t, "num_values", 1) * getattr(t, "num_queries", 1) > 1]
    if method == "forced" and several:
        yield (
            f"{', '.join(several)}: teacher-forced, several values are expected in one order (that of the text, "
            "of several names that of the question); method='generated' takes them in any order, as RULER does"
        )
    yield from haystack_notes(plan.haystack, plan.tasks, max(plan.lengths))
