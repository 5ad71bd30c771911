"""The text that needles are hidden in: Python's own documentation, a text of yours, or a column of a dataset."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_SENTENCE_ENDS = (".", "!", "?", '."', ".)", "?)", '?"')


@dataclass(frozen=True)
class Haystack:
    """A text as words.

    Attributes:
        words: the words in order.
        origin: where they come from, for messages and results.
        repeats: whether a context longer than the text starts over (the built-in prose does), or is refused.
    """

    words: tuple[str, ...]
    origin: str
    repeats: bool = False

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError(f"the haystack ({self.origin}) has no words in it")

    def start(self, rng: random.Random) -> int:
        """A random place where a sentence begins."""
        place = rng.randrange(len(self.words))
        while place > 0 and not self.words[place - 1].endswith(_SENTENCE_ENDS):
            place -= 1
        return place

    def sentences(self, num_words: int, start: int) -> list[str]:
        """`num_words` words from `start` on, cut into sentences; past its end the text goes on from its beginning.

        Raises ValueError if that many words would repeat the text and `repeats` is False.
        """
        if num_words > len(self.words) and not self.repeats:
            raise ValueError(
                f"the haystack ({self.origin}) has {len(self.words):,} words, and {num_words:,} are needed for this "
                "length: give a longer text, ask for a shorter length, or allow Haystack(..., repeats=True)"
            )
        size = len(self.words)
        return _in_sentences([self.words[(start + i) % size] for i in range(num_words)])


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
        return Haystack(tuple(source.split()), "the given text")
    if isinstance(source, tuple) and len(source) == 2 and hasattr(source[0], "column_names"):
        dataset, column = source
        if column not in dataset.column_names:
            import difflib

            near = difflib.get_close_matches(str(column), dataset.column_names, n=1) or dataset.column_names
            raise ValueError(f"the dataset has no column {column!r}; nearest: {', '.join(near)}")
        return Haystack(_all_words(dataset[column], f"column {column!r}"), f"column {column!r} of the given dataset")
    if isinstance(source, Sequence):
        return Haystack(_all_words(source, "the given texts"), "the given texts")
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


def _all_words(texts: Iterable[Any], what: str) -> tuple[str, ...]:
    words: list[str] = []
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{what} holds a {type(text).__name__} where a text is needed")
        words += text.split()
    return tuple(words)


def _in_sentences(words: Sequence[str]) -> list[str]:
    sentences: list[str] = []
    begin = 0
    for i, word in enumerate(words):
        if word.endswith(_SENTENCE_ENDS):
            sentences.append(" ".join(words[begin : i + 1]))
            begin = i + 1
    if begin < len(words):
        sentences.append(" ".join(words[begin:]))
    return sentences
