"""Cut a reasoning trace into steps, at sentences that begin with a word of transition."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from routeguard.recall.boundaries import ends_sentence

# Words with which English reasoning traces turn to something new; ours. `transition_words` finds those of a model.
TRANSITION_WORDS = (
    *("wait", "alternatively", "however", "hmm", "so", "now", "next", "then", "first", "second", "third", "finally"),
    *("therefore", "thus", "but", "let", "okay", "ok", "actually", "maybe", "perhaps", "similarly", "since", "because"),
    *("another", "also", "again", "check", "verify", "suppose", "assume", "consider", "given", "step", "to"),
)
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a trace: where it starts and ends in the text (blanks after it included), and its first word."""

    start: int
    stop: int
    first_word: str


def sentences(text: str) -> list[Sentence]:
    """Sentences of a text, and lines: what follows `.`, `!`, `?` and their like, or a line break, begins one.

    A bullet or number before a sentence ("1.", "-") is part of it, and not its first word.

    Together they are the whole text; blanks belong to the sentence before them.
    """
    found: list[tuple[int, str]] = []
    fresh = True
    last_stop = 0
    for match in _WORD.finditer(text):
        word = normal(match.group())
        fresh = fresh or "\n" in text[last_stop : match.start()]
        marker = False
        if fresh:
            found.append((match.start(), word))
            marker = not word  # a bullet or a number: the sentence's first word is still to come, and it ends nothing
        elif not found[-1][1]:
            found[-1] = (found[-1][0], word)
        fresh = not marker and ends_sentence(match.group())
        last_stop = match.end()
    if not found:
        return []
    stops = [start for start, _ in found[1:]] + [len(text)]
    starts = [0] + [start for start, _ in found[1:]]
    return [Sentence(start, stop, word) for start, stop, (_, word) in zip(starts, stops, found, strict=True)]


def normal(word: str) -> str:
    """A word as lists hold it: lower case, without punctuation around it ("Wait," is "wait"; "2." is "")."""
    return re.sub(r"^\W+|\W+$", "", word.casefold()).strip("0123456789")


def segment_steps(
    trace: str, *, words: Iterable[str] = TRANSITION_WORDS, min_words: int = 8, max_words: int = 256
) -> list[str]:
    """Cut a trace into steps; joined together they are the trace again.

    A step begins at a sentence whose first word is one of `words`, once the step before has `min_words`. A step that
    would be longer than `max_words` is cut at the sentence before; a single longer sentence stays whole.

    Args:
        trace: the reasoning, without the prompt and the answer.
        words: transition words, in any spelling.
        min_words: shorter steps take in the next sentence. Default 8 (ours).
        max_words: longest step, so that it fits the window that generation gives it. Default 256 (ours).

    Raises ValueError for a trace without any word, and limits that make no sense.

    Source: arXiv 2602.01198, data: sentence-initial tokens of high entropy; the lengths are ours.
    """
    if min_words < 1 or max_words < min_words:
        raise ValueError(f"min_words must be at least 1 and max_words no less; got {min_words} and {max_words}")
    wanted = {normal(word) for word in words} - {""}
    if not wanted:
        raise ValueError("no transition words given: every trace would be one step")
    found = sentences(trace)
    if not found:
        raise ValueError("the trace has no words, so it has no steps")
    cuts, held = [0], 0
    for sentence in found:
        size = len(_WORD.findall(trace[sentence.start : sentence.stop]))
        turns = sentence.first_word in wanted and held >= min_words
        if held and (turns or held + size > max_words):
            cuts.append(sentence.start)
            held = 0
        held += size
    cuts = [0] + [_before_blanks(trace, cut) for cut in cuts[1:]]
    return [trace[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(trace)], strict=True)]


def _before_blanks(text: str, place: int) -> int:
    """Blanks open the step that follows them: most tokenizers hold a blank and the word after it in one token."""
    while place and text[place - 1] in " \t":
        place -= 1
    return place
