"""Judge answers: right, a near miss, or wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

Outcome = Literal["right", "close", "other", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("right", "close", "other", "wrong")

_CONTROL = re.compile(r"[\x00-\x1f]")
_WORD = re.compile(r"[\w-]+")


def clean(answer: str) -> str:
    """What RULER does to an answer before it is scored: control characters become line breaks, ends are stripped."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_score(answer: str, values: Sequence[str]) -> float:
    """RULER's score of one answer: the share of the values that occur in it, whatever the case (0 to 1).

    Source: "string match all" of RULER (arXiv 2404.06654); equal to lm-evaluation-harness' on the same answers.
    """
    text = clean(answer).lower()
    return sum(value.lower() in text for value in values) / len(values)


def judge(answer: str, value: str, *, asked: Iterable[str] = (), others: Iterable[str] = ()) -> Outcome:
    """Say how an answer fares with one of its values.

    "right": the value occurs in the answer. "close": something in the answer is a character or two off (one for values
    of 4 to 31 characters, one more for every further 16). "other": the answer holds a value that stands in the text but
    belongs to another name. "wrong": nothing of that.

    Args:
        answer: the model's words.
        value: the value looked for.
        asked: the other values that were asked for too; they are no near miss.
        others: values in the text that nobody asked for.
    """
    text = clean(answer).lower()
    value = value.lower()
    if value in text:
        return "right"
    limit = 0 if len(value) < 4 else max(1, len(value) // 16)
    known = {other.lower() for other in others}
    answered = [word for word in _WORD.findall(text) if word not in known and word not in {a.lower() for a in asked}]
    if limit and any(_distance(word, value, limit) <= limit for word in answered):
        return "close"
    return "other" if any(other in text for other in known) else "wrong"


def _distance(left: str, right: str, limit: int) -> int:
    """Levenshtein distance, or `limit + 1` where it is larger."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        before, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
        if min(row) > limit:
            return limit + 1
    return row[-1]
