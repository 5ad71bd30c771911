"""What a recall task is: something that drafts a question about a text of any length."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from routeguard.recall.haystack import Haystack
from routeguard.recall.key_words import Split


@dataclass(frozen=True)
class Material:
    """What a task writes with: the prose of its haystack, and which half of the names and values it may use."""

    haystack: Haystack
    split: Split = "measure"


@dataclass(frozen=True)
class Rendered:
    """A text at one size.

    Attributes:
        turns: the turns of the conversation, alternating, the first by the user.
        depths: for each answer, where in the context it stands: 0 at its beginning, 1 at its end.
        others: values in the text that nobody asks for; answering with one of them is a near miss.
    """

    turns: tuple[str, ...]
    depths: tuple[float, ...]
    others: frozenset[str] = frozenset()


class Draft(Protocol):
    """One drawn question: names and values are fixed, the amount of text around them is not."""

    @property
    def answers(self) -> tuple[str, ...]:
        """The values asked for, in the order in which a teacher-forced answer lists them."""

    @property
    def answer_prefix(self) -> str:
        """How the answer begins, before its first value."""

    def render(self, num_words: int, extra: str = "") -> Rendered:
        """The text with `num_words` words of haystack, and `extra` at the end of the context."""


class Task(Protocol):
    """A kind of question. One that does not write with its material's haystack says so: `uses_haystack = False`."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def joiner(self) -> str:
        """What stands between the last values of a list: "," in `a, b, and c` comes with " and"; "" for blanks only."""

    def draft(self, rng: random.Random, material: Material, depth: float | None) -> Draft:
        """Draw one question.

        Args:
            rng: the source of all randomness.
            material: haystack and names.
            depth: where the first value asked for stands, 0 to 1; None for a random place.
        """


def uses_haystack(task: Task) -> bool:
    """Whether a task hides its values in the haystack; your own do, unless `uses_haystack` is False there."""
    return bool(getattr(task, "uses_haystack", True))


def place(
    pieces: list[str], needles: list[tuple[float, str]], separator: str, glued: Collection[int] = ()
) -> tuple[str, list[float]]:
    """Insert needles between pieces at their depths (0 to 1) and join; gives the text and their true depths.

    No separator follows the pieces numbered in `glued`, unless a needle does.
    """
    placed = sorted(range(len(needles)), key=lambda i: (int(len(pieces) * needles[i][0]), i))
    out: list[str] = []
    at: dict[int, int] = {}
    length = done = 0

    def add(text: str, gap: str) -> None:
        nonlocal length
        out.append(gap + text)
        length += len(gap) + len(text)

    def gap_before(number: int) -> str:
        """What stands before a piece that follows a piece."""
        return "" if number - 1 in glued else separator

    follows_piece = False
    for i in [*placed, None]:
        stop = len(pieces) if i is None else int(len(pieces) * needles[i][0])
        for number in range(done, stop):
            add(pieces[number], gap_before(number) if follows_piece else separator if out else "")
            follows_piece = True
        done = max(done, stop)
        if i is not None:
            gap = separator if out else ""
            at[i] = length + len(gap)
            add(needles[i][1], gap)
            follows_piece = False
    text = "".join(out)
    # Depth over the places a needle can begin at, so that the last place is exactly 1.
    return text, [at[i] / max(len(text) - len(needles[i][1]), 1) for i in range(len(needles))]
