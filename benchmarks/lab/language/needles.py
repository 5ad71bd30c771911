"""Needles in filler: several kinds that share a task and nothing else, so that one can be trained and another tested.

digits    let k07 4 2 … filler … ask k07 4 2         tested, in the confirmation only
colours   put c07 red blue … filler … get c07 red blue    modes and strengths are chosen on it
letters   pin t07 A C … filler … find t07 A C        replayed
owners    own p07 river … filler … who p07 river     replayed; answers look like filler
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lab.language import words as w
from routeguard.demo import tasks
from routeguard.demo.tasks import Sample


@dataclass(frozen=True)
class NeedleKind:
    """How needles of one kind are told and asked for.

    Attributes:
        name: its name in tables.
        tell, ask: the words that open a needle and a question; no other kind has them.
        keys: what is asked about, each at most once in a sample.
        values: what answers are made of.
        num_values: words of an answer.
    """

    name: str
    tell: str
    ask: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    num_values: int = 2

    @property
    def num_words(self) -> int:
        """Words of a needle, and of a question with its answer."""
        return 2 + self.num_values


DIGITS = NeedleKind("digits", tasks.LET, tasks.ASK, tasks.NAMES, tasks.DIGITS)
COLOURS = NeedleKind("colours", w.PUT, w.GET, w.CODES, w.COLOURS)
LETTERS = NeedleKind("letters", w.PIN, w.FIND, w.TAGS, w.LETTERS)
OWNERS = NeedleKind("owners", w.OWN, w.WHO, w.PLACES, tasks.FILLER, num_values=1)

NEEDLE_KINDS = {kind.name: kind for kind in (DIGITS, COLOURS, LETTERS, OWNERS)}
TESTED, DEVELOPMENT, REPLAYED = DIGITS, COLOURS, (LETTERS, OWNERS)


def needle_sample(kind: NeedleKind, num_words: int, num_needles: int, rng: random.Random) -> Sample:
    """Hide needles at random places in filler, then ask for each of them once, in random order.

    Args:
        kind: which needles.
        num_words: words of the sample, `<s>` not counted.
        num_needles: how many different keys are told and asked for.
        rng: source of all randomness.

    The loss (and the recall score) counts the words of the answers, nothing else.

    Raises:
        ValueError: the needles and questions do not fit in `num_words`, or there are too few keys.
    """
    num_filler = num_words - 2 * kind.num_words * num_needles
    if not 1 <= num_needles <= len(kind.keys) or num_filler < 0:
        raise ValueError(
            f"{num_needles} needles of the kind {kind.name} asked for in {num_words} words: give 1 to {len(kind.keys)} "
            f"needles and at least {2 * kind.num_words} words a needle"
        )
    keys = rng.sample(kind.keys, num_needles)
    answers = {key: tuple(rng.choices(kind.values, k=kind.num_values)) for key in keys}
    filler = rng.choices(tasks.FILLER, k=num_filler)
    places = sorted(rng.randint(0, num_filler) for _ in keys)

    words: list[str] = []
    for start, stop, key in zip([0, *places], places, keys, strict=False):
        words += [*filler[start:stop], kind.tell, key, *answers[key]]
    words += filler[places[-1] :]
    in_loss = [False] * len(words)
    for key in rng.sample(keys, num_needles):
        words += [kind.ask, key, *answers[key]]
        in_loss += [False, False, *[True] * kind.num_values]
    return Sample(tuple(words), tuple(in_loss))


def most_needles(kinds: Sequence[NeedleKind], num_words: int) -> int:
    """How many needles of any of the kinds fit in that many words, at most 8."""
    return min(8, num_words // (2 * max(kind.num_words for kind in kinds)))
