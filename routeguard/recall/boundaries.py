"""Where a text of any script may be cut: after sentences, or else after lines, between words, between characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

GLUED, LINE_END, TEXT_END = 1, 2, 4  # marks: no blank follows the word; it ends a line; it ends a paragraph or text

_CLOSERS = "\"')]}»”’」』）】》〉］｝"
_OPENERS = "「『（【《〈“‘［｛"
# "Sentence_Terminal" of the scripts that are written most (Unicode Standard Annex 29).
_SENTENCE_ENDS = tuple(".!?…‼⁇⁈⁉。．！？｡؟۔।॥։።፧။។៕༎॥᙮꓿⸮")
_CLAUSE_ENDS = tuple(",;:，、；：､،؛፣၊")
# Scripts written without blanks: Thai, Lao, Tibetan, Burmese, Khmer, then Chinese and Japanese.
_UNSPACED = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31f0-\u9fff\uf900-\ufaff\uff00-\uffef"
_UNSPACED += "\U00020000-\U0003ffff"
_LONGEST_WORD = 60  # characters; what is longer without a blank is no word, and is taken character by character
_LONGEST_SENTENCE = 120  # words, or characters of a script without blanks; no cut within it would blur the depths
_STEP = 24  # words between cuts where nothing tells where to cut


@dataclass(frozen=True)
class Stops:
    """After which words of a text something may be inserted.

    Attributes:
        after: one byte a word, not zero where something may follow it.
        lines, words, characters: how many words stand in stretches that had to be cut after lines, between words, and
            within them, because they have no sentence end for 120 words.
    """

    after: bytes
    lines: int = 0
    words: int = 0
    characters: int = 0


def split_words(text: str) -> tuple[list[str], bytearray]:
    """Cut a text into words, and single characters where a script has no blanks; gives them with their marks."""
    words: list[str] = []
    marks = bytearray()
    for line in text.splitlines():
        runs = line.split()
        if not runs and marks:
            marks[-1] |= TEXT_END
        for run in runs:
            parts = _parts(run)
            words += parts
            marks += bytes([GLUED] * (len(parts) - 1) + [0])
        if runs:
            marks[-1] |= LINE_END
    if marks:
        marks[-1] |= TEXT_END
    return words, marks


def ends_sentence(word: str) -> bool:
    """Whether a word ends in what ends a sentence, closing quotes and brackets aside."""
    return word.rstrip(_CLOSERS).endswith(_SENTENCE_ENDS)


def find_stops(words: Sequence[str], marks: bytes) -> Stops:
    """Decide where a text may be cut: after its sentences, paragraphs and end.

    A stretch of more than 120 words without any is cut after its lines, and what is still that long every 24 to 48
    words: after a comma, else at a blank, else between two characters.

    Args:
        words: as `split_words` gives them.
        marks: one byte a word, or none at all.
    """
    marks = marks or bytes(len(words))
    after = bytearray(bool(mark & TEXT_END) or ends_sentence(word) for word, mark in zip(words, marks, strict=True))
    counts = {"lines": 0, "words": 0, "characters": 0}
    for begin, stop in _long_stretches(after, 0, len(words)):
        counts["lines"] += stop - begin
        for i in range(begin, stop):
            after[i] |= bool(marks[i] & LINE_END)
        for first, end in _long_stretches(after, begin, stop):
            counts["lines"] -= end - first
            last = first
            while last + _STEP < end - _STEP // 2:
                place, within = _nearby(words, marks, last + _STEP, min(last + 2 * _STEP, end))
                after[place] = 1
                counts["characters" if within else "words"] += place + 1 - last
                last = place + 1
            counts["words"] += end - last
    return Stops(bytes(after), **counts)


def _long_stretches(after: bytearray, begin: int, stop: int) -> list[tuple[int, int]]:
    """Stretches `[begin, stop)` without a stop inside that are too long."""
    found = []
    while begin < stop:
        end = after.find(1, begin, stop) + 1 or stop
        if end - begin > _LONGEST_SENTENCE:
            found.append((begin, end))
        begin = end
    return found


def _nearby(words: Sequence[str], marks: bytes, at: int, stop: int) -> tuple[int, bool]:
    """The best word from `at` on to cut after, and whether the cut is within a word."""
    for i in range(at, stop):
        if words[i].rstrip(_CLOSERS).endswith(_CLAUSE_ENDS):
            return i, False
    for i in range(at, stop):
        if not marks[i] & GLUED:
            return i, False
    return at, True


def _parts(run: str) -> list[str]:
    """A run of text without blanks as words and single characters, closing punctuation left where it belongs."""
    parts: list[str] = []
    for part in [run] if run.isascii() else _pattern().findall(run):
        parts += [part] if len(part) <= _LONGEST_WORD else list(part)
    return parts


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    """One character of a script without blanks with what clings to it, or a run of others."""
    ranges = ((0x0E00, 0x1100), (0x1780, 0x1800), (0x3000, 0x3100), (0xFE00, 0xFE10))
    clinging = [chr(c) for low, high in ranges for c in range(low, high) if unicodedata.category(chr(c))[0] == "M"]
    clinging += [*_CLOSERS, *_SENTENCE_ENDS, *_CLAUSE_ENDS, "ー", "々", "་", "\u200b", "\u200d"]
    after = re.escape("".join(dict.fromkeys(clinging)))
    before = re.escape(_OPENERS)
    return re.compile(rf"[{before}]*[{_UNSPACED}][{after}]*|[{before}]*[^{_UNSPACED}{before}]+|[{before}]+")
