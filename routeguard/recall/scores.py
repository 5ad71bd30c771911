"""What is known of one answered sample."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from routeguard.recall.outcome import OUTCOMES, Outcome, judge, string_score
from routeguard.recall.sample import Sample


@dataclass(frozen=True)
class ValueScore:
    """One value that was asked for: where it stood, what came, and how that is judged ("right" ... "wrong")."""

    value: str
    depth: float
    outcome: Outcome
    answer: str


@dataclass(frozen=True)
class SampleScore:
    """One sample's result.

    Attributes:
        task, length_tokens, depth, index: which sample; `key` is the hash of its tokens, for pairing.
        score: share of its values that are right, 0 to 1.
        values: each value by itself.
        token_accuracy: share of the values' tokens that the model ranks first; None when generated.
        nll: mean nats a token of the values; None when generated.
    """

    key: str
    task: str
    length_tokens: int
    depth: float | None
    index: int
    score: float
    values: tuple[ValueScore, ...]
    token_accuracy: float | None = None
    nll: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SampleScore:
        """Raises ValueError for what `to_dict` does not write."""
        try:
            values = tuple(ValueScore(**value) for value in data["values"])
            score = cls(**{**data, "values": values})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a sample score: {error}") from None
        wrong = [
            f"{name}={getattr(score, name)!r}"
            for name, kinds in (("key", str), ("task", str), ("length_tokens", int), ("index", int))
            if not isinstance(getattr(score, name), kinds)
        ]
        if not _is_number(score.score) or not 0 <= score.score <= 1:
            wrong.append(f"score={score.score!r}")
        wrong += [f"value depth={value.depth!r}" for value in values if not _is_number(value.depth)]
        wrong += [
            f"{name}={number!r}"
            for name, number in (("depth", score.depth), ("token_accuracy", score.token_accuracy), ("nll", score.nll))
            if number is not None and not isinstance(number, (int, float))
        ]
        if wrong:
            raise ValueError(f"not a sample score: {', '.join(wrong)}")
        if any(value.outcome not in OUTCOMES for value in values):
            raise ValueError(f"unknown outcomes in {[value.outcome for value in values]}; there are {OUTCOMES}")
        return score


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def score_answers(
    sample: Sample,
    answers: list[str],
    right: list[bool] | None = None,
    *,
    token_accuracy: float | None = None,
    nll: float | None = None,
) -> SampleScore:
    """Judge the answers to a sample's values.

    Args:
        sample: the question.
        answers: for each value the text to look in: the same whole text when generated, its own span when forced.
        right: for each value whether every token is right (teacher-forced); None: whether it occurs in the text.
        token_accuracy, nll: of the teacher-forced tokens.
    """
    values = []
    for i, (value, depth, answer) in enumerate(zip(sample.values, sample.depths, answers, strict=True)):
        if right is not None and right[i]:
            outcome: Outcome = "right"
        else:
            asked = [other for other in sample.values if other != value]
            outcome = judge(answer, value, asked=asked, others=sample.others)
            if outcome == "right" and right is not None:
                outcome = "close"  # the same letters from other tokens: greedy decoding would not have written them
        values.append(ValueScore(value, depth, outcome, answer))
    score = (
        string_score(answers[0], sample.values)
        if right is None
        else sum(value.outcome == "right" for value in values) / len(values)
    )
    return SampleScore(
        key=sample.key,
        task=sample.task,
        length_tokens=sample.length_tokens,
        depth=sample.depth,
        index=sample.index,
        score=score,
        values=tuple(values),
        token_accuracy=token_accuracy,
        nll=nll,
    )
