"""The toy language of the demo: needles in filler text, and running sums over named variables.

Every sample is a sequence of words that the shipped tokenizer encodes one to one:

    needle          let k07 4 2 ... filler ... let k31 9 0 ... filler ... ask k31 9 0 ask k07 4 2
    running sum     let k07 4 ... filler ... ask k07 + 3 = 7 ; let k12 7 ... filler ... ask k12 + 5 = 2 ; let k03 2

Needles measure long-range recall. Running sums (digits, modulo 10) are the chain of thought: in pretraining a step may
look up any earlier variable, in fine-tuning it always looks up the one defined just before. That is the Markov
structure of chain-of-thought text, whose routing gradients only see short distances. The filler between two steps is
longer than the model's convolutions reach, so the look-up needs attention, yet only a local one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
LET, ASK, PLUS, EQUALS, END = "let", "ask", "+", "=", ";"
DIGITS = tuple("0123456789")
NAMES = tuple(f"k{i:02d}" for i in range(40))
FILLER = (
    *("river", "stone", "cloud", "amber", "violet", "meadow", "lantern", "copper"),
    *("winter", "harbor", "cedar", "saddle", "ribbon", "thunder", "velvet", "marble"),
    *("island", "feather", "garden", "candle", "orchard", "shadow", "bridge", "valley"),
)
VOCABULARY = (PAD, BOS, EOS, UNK, LET, ASK, PLUS, EQUALS, END, *DIGITS, *NAMES, *FILLER)

Sums = Literal["known", "all"]
Reach = Literal["previous", "any"]

_STEP_WORDS = 10
_NEEDLE_WORDS = 4


@dataclass(frozen=True)
class Sample:
    """One sequence: its words (without the leading `<s>`), and for each word whether the loss counts it."""

    words: tuple[str, ...]
    in_loss: tuple[bool, ...]

    @property
    def text(self) -> str:
        """The words joined by blanks, as the tokenizer reads them."""
        return " ".join(self.words)


def is_known_sum(left: int, right: int) -> bool:
    """Whether pretraining shows `left + right`: 75 of the 100 sums of two digits; fine-tuning teaches the other 25."""
    return (7 * left + 3 * right) % 4 != 0


def needle_sample(num_words: int, num_needles: int, rng: random.Random) -> Sample:
    """Hide needles `let NAME d d` at random places in filler text, then ask for each of them once, in random order.

    Args:
        num_words: length of the sample in words, `<s>` not counted; at least `8 * num_needles`.
        num_needles: how many different names are defined and asked for, 1 to 40.
        rng: source of all randomness.

    The loss (and the recall score) counts the two answer digits of each question, nothing else.

    Raises:
        ValueError: the needles and questions do not fit in `num_words`, or there are too few names.
    """
    num_filler = num_words - 2 * _NEEDLE_WORDS * num_needles
    if not 1 <= num_needles <= len(NAMES) or num_filler < 0:
        raise ValueError(
            f"{num_needles} needles asked for in {num_words} words: give 1 to {len(NAMES)} needles and"
            f" at least {2 * _NEEDLE_WORDS} words a needle"
        )
    names = rng.sample(NAMES, num_needles)
    values = [(rng.choice(DIGITS), rng.choice(DIGITS)) for _ in names]
    filler = rng.choices(FILLER, k=num_filler)
    places = sorted(rng.randint(0, num_filler) for _ in names)

    words: list[str] = []
    for start, stop, name, value in zip([0, *places], places, names, values, strict=False):
        words += [*filler[start:stop], LET, name, *value]
    words += filler[places[-1] :]
    in_loss = [False] * len(words)
    for i in rng.sample(range(num_needles), num_needles):
        words += [ASK, names[i], *values[i]]
        in_loss += [False, False, True, True]
    return Sample(tuple(words), tuple(in_loss))


def sum_sample(num_words: int, rng: random.Random, *, sums: Sums, reach: Reach) -> Sample:
    """Write a chain of running sums, as many steps `ask x + d = t ; let y t` as fit in `num_words`.

    Args:
        num_words: most words in the sample, `<s>` not counted; at least 22, so that one step fits.
        rng: source of all randomness.
        sums: "known" draws only sums that pretraining shows, "all" draws from the whole table.
        reach: which earlier variable a step looks up: always the "previous" one (chain of thought), or "any".

    The loss counts what is determined by the text so far: answers, structure, and the looked-up name when it is always
    the previous one. Filler, the added digit and new names are random and do not count.

    Raises:
        ValueError: `num_words` is too small for one step.
    """
    if num_words < 2 + 10 + _STEP_WORDS:
        raise ValueError(f"a running sum needs at least {2 + 10 + _STEP_WORDS} words, {num_words} given")
    names = rng.sample(NAMES, len(NAMES))
    value = rng.randrange(10)
    defined = [(names[0], value)]
    words = [LET, names[0], DIGITS[value]]
    in_loss = [False, False, False]
    for name in names[1:]:
        source, value = defined[-1] if reach == "previous" else rng.choice(defined)
        added = rng.choice([d for d in range(10) if sums == "all" or is_known_sum(value, d)])
        total = DIGITS[(value + added) % 10]
        filler = rng.choices(FILLER, k=rng.randint(4, 9))
        if len(words) + len(filler) + _STEP_WORDS > num_words:
            break
        words += [*filler, ASK, source, PLUS, DIGITS[added], EQUALS, total, END, LET, name, total]
        in_loss += [False] * len(filler)
        in_loss += [True, reach == "previous", True, False, True, True, True, True, False, True]
        defined.append((name, int(total)))
    return Sample(tuple(words), tuple(in_loss))


def sums_in(sample: Sample) -> Iterator[tuple[int, int, int]]:
    """Yield `(position of "=", left digit, right digit)` for each sum in a sample."""
    for i, word in enumerate(sample.words):
        if word == EQUALS:
            right, total = int(sample.words[i - 1]), int(sample.words[i + 1])
            yield i, (total - right) % 10, right
