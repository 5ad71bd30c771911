"""What a probe asks: its samples, made once before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeguard.recall.answering import answer_forced
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack_use import haystack_notes
from routeguard.recall.measure import DEPTHS, Plan
from routeguard.recall.model_config import max_positions
from routeguard.recall.probe_budget import ProbeBudget, choose_questions, training_passes
from routeguard.recall.probe_record import RECORD_FILE, recorded_settings
from routeguard.recall.sample import Sample, ShortLengthError
from routeguard.recall.scores import SampleScore
from routeguard.recall.task import Task
from routeguard.recall.training_length import longest_row, training_length

if TYPE_CHECKING:
    from routeguard.recall.probe import RecallProbe


@dataclass(frozen=True)
class ProbeSamples:
    """All questions of a probe.

    Attributes:
        samples: short lengths first.
        tasks: what they ask; fewer than the probe's where the training is short.
        tokenizer: to show what was predicted.
        settings: what results carry.
        trained_tokens: the training length; None where the rows do not tell it.
        budget: how many samples there are, and what they are estimated to cost.
        notes: about what was left out to stay within the share, and about the haystack.
    """

    samples: tuple[Sample, ...]
    tasks: tuple[Task, ...]
    tokenizer: Any
    settings: dict[str, Any]
    trained_tokens: int | None
    budget: ProbeBudget
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> list[int]:
        return sorted({sample.length_tokens for sample in self.samples})

    def answer(self, model: Any, batch_tokens: int) -> list[SampleScore]:
        """Teacher-forced scores of all samples, `batch_tokens` at most in a forward pass."""
        groups: dict[tuple[str, int], list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault((sample.task, sample.length_tokens), []).append(sample)
        scores = []
        for (_, length), group in groups.items():
            size = max(1, batch_tokens // length)
            for first in range(0, len(group), size):
                scores += answer_forced(model, self.tokenizer, group[first : first + size])
        return scores


def probe_samples(
    probe: RecallProbe, model: Any, args: Any, state: Any, *, tokenizer: Any, dataloader: Any
) -> ProbeSamples:
    """Make the samples of a probe.

    Args:
        probe: its settings.
        model: the model below every wrapper.
        args, state: the Trainer's.
        tokenizer: the Trainer's `processing_class`, if the probe has none.
        dataloader: the training's; its rows tell how long the training is, and its length where `args` do not.

    Raises ValueError without a tokenizer or a length, and for lengths that model, needles or haystack do not allow.
    """
    tokenizer = probe.tokenizer if probe.tokenizer is not None else tokenizer
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a multimodal processor holds one
    if tokenizer is None:
        raise ValueError(
            "RecallProbe needs a tokenizer: give the Trainer processing_class=, or RecallProbe(tokenizer=)"
        )
    longest = longest_row(dataloader)
    trained = None if longest is None else training_length(args, longest)
    positions = max_positions(model)
    lengths = _given(probe, positions) if probe.lengths else _default(training_length(args, longest), positions)
    tasks, given = probe.tasks, probe.num_samples
    shrinks = given is None
    recorded = recorded_settings(Path(args.output_dir) / RECORD_FILE) if state.global_step else None
    if given is None and recorded is not None:  # a resumed run asks what it asked first
        given, shrinks = recorded["num_samples"], False
        lengths = lengths if probe.lengths else tuple(recorded["lengths"])
        if not probe.tasks_given:
            tasks = tuple(task for task in tasks if task.name in recorded["tasks"]) or tasks
    passes = training_passes(model, args, dataloader, state.max_steps)
    encoder = Encoder(tokenizer, chat=probe.chat)
    while True:
        questions = choose_questions(
            tasks,
            lengths,
            given,
            fewer_tasks=shrinks and not probe.tasks_given,
            fewer_lengths=shrinks and not probe.lengths,
            passes=passes,
            share=probe.share,
            every=probe.every,
            max_steps=state.max_steps,
        )
        plan = Plan(
            questions.tasks, questions.lengths, DEPTHS, questions.budget.num_samples, probe.haystack, probe.seed
        )
        try:
            samples = [plan.sample(encoder, *cell, i) for cell in plan.cells() for i in range(plan.num_samples)]
            break
        except ShortLengthError:
            longer = _default(2 * min(questions.lengths), positions)
            if probe.lengths or min(longer) == min(questions.lengths):
                raise
            lengths = longer
    settings = {**plan.to_dict(), "method": "forced", "chat": probe.chat}
    notes = (*questions.notes, *haystack_notes(plan.haystack, plan.tasks, max(plan.lengths)))
    return ProbeSamples(tuple(samples), plan.tasks, tokenizer, settings, trained, questions.budget, notes)


def _default(trained: int, positions: int | None) -> tuple[int, ...]:
    return tuple(sorted({min(n, positions or n) for n in (trained, 2 * trained)}))


def _given(probe: RecallProbe, positions: int | None) -> tuple[int, ...]:
    lengths = probe.lengths or ()
    if positions is not None and max(lengths, default=0) > positions and not probe.insist:
        raise ValueError(
            f"RecallProbe length {max(lengths)} is beyond the model's {positions} positions; give shorter "
            "lengths=, or insist=True"
        )
    return lengths
