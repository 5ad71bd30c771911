"""Recall after reasoning: a chain of thought stands between the text and the question about it.

Recall can fall after a short reasoning span even where it is intact without one (RecaLLM, arXiv 2604.09494).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from routeguard.recall.demo_needles import DemoNeedles
from routeguard.recall.task import Draft, Material, Rendered, Task, uses_haystack

SUFFIX = "+reasoning"


@dataclass(frozen=True)
class AfterReasoning:
    """Any task, with a chain of thought about something else before its question.

    Args:
        task: a task whose question is the last line of its text.
        num_steps: length of the chain; a step is a sentence of about 25 tokens.

    Raises ValueError for the demo's needles, whose language has no words for a chain of thought; samples of it raise
    ValueError where the question is not on a line of its own.
    """

    task: Task
    num_steps: int = 12

    def __post_init__(self) -> None:
        if isinstance(self.task, DemoNeedles):
            raise ValueError(
                f"no recall task '{self.task.name}{SUFFIX}': the demo's language has no words for a chain of thought; "
                f"ask {self.task.name} alone, or another task with '{SUFFIX}'"
            )

    @property
    def name(self) -> str:
        return self.task.name + SUFFIX

    @property
    def joiner(self) -> str:
        return self.task.joiner

    @property
    def uses_haystack(self) -> bool:
        return uses_haystack(self.task)

    def draft(self, rng: random.Random, material: Material, depth: float | None) -> Draft:
        draft = self.task.draft(rng, material, depth)
        numbers = [rng.randint(11, 99) for _ in range(self.num_steps + 1)]
        return _ReasoningDraft(self.task.name, draft, _problem(numbers), _chain(numbers))


@dataclass(frozen=True)
class _ReasoningDraft:
    task: str
    draft: Draft
    problem: str
    chain: str

    @property
    def answers(self) -> tuple[str, ...]:
        return self.draft.answers

    @property
    def answer_prefix(self) -> str:
        return self.draft.answer_prefix

    def render(self, num_words: int, extra: str = "") -> Rendered:
        rendered = self.draft.render(num_words, extra)
        *before, last = rendered.turns
        text, line_break, question = last.rpartition("\n")
        if not line_break:
            raise ValueError(
                f"no '{self.task}{SUFFIX}': the last turn of {self.task} has no line break, so that its question "
                "cannot be told from its text; have the task put its question on a line of its own, the last"
            )
        return replace(rendered, turns=(*before, f"{text}\n{self.problem}", self.chain, question))


def _problem(numbers: list[int]) -> str:
    return f"Before the quiz, add up these numbers, one at a time: {', '.join(map(str, numbers))}."


def _chain(numbers: list[int]) -> str:
    total = numbers[0]
    steps = [f"Let me go through them one at a time. I start with {total}."]
    for number in numbers[1:]:
        steps.append(
            f"Next comes {number}. {total} + {number} = {total + number}, so the sum so far is {total + number}."
        )
        total += number
    return " ".join([*steps, f"That was the last number, so the sum is {total}."])
