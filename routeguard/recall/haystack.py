"""The text that needles are hidden in: Python's own documentation, a text of yours, or a column of a dataset."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from routeguard.recall.boundaries import GLUED, Stops, find_stops, split_words


class ShortHaystackError(ValueError):
    """A text is shorter than asked; `num_words` is how many it has."""

    def __init__(self, message: str, num_words: int) -> None:
        super().__init__(message)
        self.num_words = num_words


@dataclass(frozen=True)
class Haystack:
    """A text as words, or as characters where its script has no blanks between words.

    Attributes:
        words: the words in order.
        origin: where they come from, for messages and results.
        repeats: whether a context longer than the text starts over (the built-in prose does), or is refused.
        marks: one byte a word: what follows it (`boundaries`). None at all: a blank follows each.
    """

    words: tuple[str, ...]
    origin: str
    repeats: bool = False
    marks: bytes = b""

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError(f"the haystack ({self.origin}) has no words in it")
        if self.marks and len(self.marks) != len(self.words):
            raise ValueError(f"{len(self.words)} words need as many marks, or none; got {len(self.marks)}")

    @property
    def builtin(self) -> bool:
        """Whether it is the built-in prose, which nobody chose."""
        return self is builtin_prose()

    @property
    def unit(self) -> str:
        """What most of its words are: "words" or "characters"."""
        return "characters" if 2 * sum(mark & GLUED for mark in self.marks) > len(self.words) else "words"

    @cached_property
    def stops(self) -> Stops:
        """Where needles may stand."""
        return find_stops(self.words, self.marks)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where needles do not stand after sentences, in a sentence each; none for 1 % of the text or less."""
        places = (("after lines", self.stops.lines), ("between words", self.stops.words),
                  ("between characters", self.stops.characters))  # fmt: skip
        return tuple(
            f"{count / len(self.words):.0%} of the haystack ({self.origin}) is in stretches of more than 120 "
            f"{self.unit} without a sentence end; needles stand {where} there"
            for where, count in places
            if count > 0.01 * len(self.words)
        )

    def start(self, rng: random.Random) -> int:
        """A random place where a sentence begins."""
        return self.stops.after.rfind(1, 0, rng.randrange(len(self.words))) + 1

    def pieces(self, num_words: int, start: int) -> tuple[list[str], frozenset[int]]:
        """`num_words` words from `start` on, cut where needles may stand, and the pieces that no blank follows.

        Past its end the text goes on from its beginning.

        Raises ShortHaystackError if that many words would repeat the text and `repeats` is False.
        """
        if num_words > len(self.words) and not self.repeats:
            raise ShortHaystackError(
                f"the haystack ({self.origin}) has {len(self.words):,} {self.unit}, and {num_words:,} are needed for "
                "this length: give a longer text, ask for a shorter length, or allow Haystack(..., repeats=True)",
                len(self.words),
            )
        size = len(self.words)
        after, marks = self.stops.after, self.marks or bytes(size)
        pieces: list[str] = []
        glued = set()
        piece = ""
        for at in range(start, start + num_words):
            i = at % size
            piece += self.words[i]
            if after[i] or at == start + num_words - 1:
                if marks[i] & GLUED:
                    glued.add(len(pieces))
                pieces.append(piece)
                piece = ""
            elif not marks[i] & GLUED:
                piece += " "
        return pieces, frozenset(glued)


def as_haystack(source: Any = None) -> Haystack:
    """Make a haystack of whatever a user has.

    Args:
        source: None (the built-in prose), a `Haystack`, a text, a sequence of texts, or `(dataset, "column")` with a
            `datasets.Dataset`.

    Raises ValueError for anything else, for a missing column (with the nearest one), and for an empty text.
    """
    if source is None:
        return builtin_prose()
    if isinstance(source, Haystack):
        return source
    if isinstance(source, str):
        return _of_texts([source], "the given text", "the given text")
    if isinstance(source, tuple) and len(source) == 2 and hasattr(source[0], "column_names"):
        dataset, column = source
        if column not in dataset.column_names:
            import difflib

            near = difflib.get_close_matches(str(column), dataset.column_names, n=1) or dataset.column_names
            raise ValueError(f"the dataset has no column {column!r}; nearest: {', '.join(near)}")
        return _of_texts(dataset[column], f"column {column!r}", f"column {column!r} of the given dataset")
    if isinstance(source, Sequence):
        return _of_texts(source, "the given texts", "the given texts")
    raise ValueError(
        f"a haystack can be a text, a sequence of texts or (dataset, 'column'), not a {type(source).__name__}"
    )


@lru_cache(maxsize=1)
def builtin_prose() -> Haystack:
    """The running prose of Python's own manual (`pydoc_data.topics`): about 22,000 words, no download."""
    from pydoc_data.topics import topics

    words: list[str] = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            if _is_prose(paragraph):
                words += paragraph.split()
    return Haystack(tuple(words), "prose of Python's manual", repeats=True)


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is running text: no code, list, table or grammar rule."""
    listed = paragraph.startswith((" ", "*", "+", "-", "|", ">>>"))
    marked = "::=" in paragraph or "***" in paragraph or not paragraph.isascii()
    return not listed and not marked and len(paragraph.split()) >= 12


def _of_texts(texts: Iterable[Any], what: str, origin: str) -> Haystack:
    words: list[str] = []
    marks = bytearray()
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{what} holds a {type(text).__name__} where a text is needed")
        more, their_marks = split_words(text)
        words += more
        marks += their_marks
    return Haystack(tuple(words), origin, marks=bytes(marks))
