"""Cut a reasoning trace into steps, at sentences that begin with a word of transition."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from routeguard.recall.boundaries import GLUED, LINE_END, ends_sentence, split_words

# Words with which reasoning traces turn to something new; ours. `transition_words` finds those of a model.
ENGLISH_TRANSITIONS = (
    *("wait", "alternatively", "however", "hmm", "so", "now", "next", "then", "first", "second", "third", "finally"),
    *("therefore", "thus", "but", "let", "okay", "ok", "actually", "maybe", "perhaps", "similarly", "since", "because"),
    *("another", "also", "again", "check", "verify", "suppose", "assume", "consider", "given", "step", "to"),
)
CHINESE_TRANSITIONS = (
    *(
        "等等",
        "等一下",
        "且慢",
        "不对",
        "不过",
        "但是",
        "但",
        "然而",
        "可是",
        "嗯",
        "或者",
        "或许",
        "也许",
        "可能",
        "另外",
        "此外",
    ),
    *(
        "所以",
        "因此",
        "于是",
        "那么",
        "综上",
        "因为",
        "由于",
        "既然",
        "现在",
        "首先",
        "其次",
        "然后",
        "接着",
        "接下来",
        "下一步",
    ),
    *(
        "最后",
        "第一",
        "第二",
        "第三",
        "让我",
        "我们再",
        "再",
        "重新",
        "检查",
        "验证",
        "假设",
        "假如",
        "如果",
        "设",
        "考虑",
        "同理",
    ),
    *("类似", "同样", "其实", "实际上", "换句话说", "换一种", "反过来", "注意", "看来", "好的"),
)
TRANSITION_WORDS = (*ENGLISH_TRANSITIONS, *CHINESE_TRANSITIONS)


@dataclass(frozen=True)
class Sentence:
    """A sentence of a trace.

    Attributes:
        start, stop: where it stands in the text, blanks after it included.
        first_word: as lists hold it (`normal`); a single character where a script has no blanks.
        word_start: where that stands in the text, after bullets and numbers.
        num_words: words, and characters of scripts without blanks.
    """

    start: int
    stop: int
    first_word: str
    word_start: int
    num_words: int


def sentences(text: str) -> list[Sentence]:
    """Sentences of a text, and lines: what follows `.`, `!`, `?`, `。` and their like, or a line break, begins one.

    A bullet or number before a sentence ("1.", "-") is part of it, and not its first word.

    Together they are the whole text; blanks belong to the sentence before them.
    """
    begun: list[dict[str, int]] = []
    firsts: list[str] = []
    fresh, place = True, 0
    words, marks = split_words(text)
    for written, mark in zip(words, marks, strict=True):
        start = text.index(written, place)
        place = start + len(written)
        word = normal(written)
        if fresh:
            begun.append({"start": start, "word_start": start, "num_words": 0})
            firsts.append(word)
        elif not firsts[-1]:
            firsts[-1], begun[-1]["word_start"] = word, start
        begun[-1]["num_words"] += 1
        marker = fresh and not word  # a bullet or a number: the first word is still to come, and it ends nothing
        within = mark & GLUED and written.isascii()  # a stop in a formula or an address
        fresh = (not marker and not within and ends_sentence(written)) or bool(mark & LINE_END)
    if not begun:
        return []
    begun[0]["start"] = 0
    stops = [one["start"] for one in begun[1:]] + [len(text)]
    return [Sentence(stop=stop, first_word=word, **one) for one, stop, word in zip(begun, stops, firsts, strict=True)]


def normal(word: str) -> str:
    """A word as lists hold it: lower case, without punctuation around it ("Wait," is "wait"; "2." is "")."""
    return re.sub(r"^\W+|\W+$", "", word.casefold()).strip("0123456789")


@lru_cache(maxsize=4096)
def stands_alone(word: str) -> bool:
    """Whether a word begins with a character of a script without blanks, so that words cannot be told apart."""
    return bool(word) and len(split_words(word[0] * 2)[0]) == 2


def segment_steps(
    trace: str, *, words: Iterable[str] = TRANSITION_WORDS, min_words: int = 8, max_words: int = 256
) -> list[str]:
    """Cut a trace into steps; joined together they are the trace again.

    A step begins at a sentence whose first word is one of `words`, once the step before has `min_words`. A step that
    would be longer than `max_words` is cut at the sentence before; a single longer sentence stays whole. Where a script
    has no blanks (Chinese, Japanese, Thai) a character counts as a word, and a sentence's beginning is compared.

    Args:
        trace: the reasoning, without the prompt and the answer.
        words: transition words, in any spelling. Default: `TRANSITION_WORDS`, for English and Chinese (ours).
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
    beginnings = tuple(word for word in wanted if stands_alone(word))
    found = sentences(trace)
    if not found:
        raise ValueError("the trace has no words, so it has no steps")
    cuts, held = [0], 0
    for sentence in found:
        turns = held >= min_words and _turns(trace, sentence, wanted, beginnings)
        if held and (turns or held + sentence.num_words > max_words):
            cuts.append(sentence.start)
            held = 0
        held += sentence.num_words
    cuts = [0] + [_before_blanks(trace, cut) for cut in cuts[1:]]
    return [trace[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(trace)], strict=True)]


def _turns(trace: str, sentence: Sentence, wanted: set[str], beginnings: tuple[str, ...]) -> bool:
    if not stands_alone(sentence.first_word):
        return sentence.first_word in wanted
    opening = re.sub(r"^[\W\d]+", "", trace[sentence.word_start : sentence.stop].casefold())
    return opening.startswith(beginnings)


def _before_blanks(text: str, place: int) -> int:
    """Blanks open the step that follows them: most tokenizers hold a blank and the word after it in one token."""
    while place and text[place - 1] in " \t":
        place -= 1
    return place
