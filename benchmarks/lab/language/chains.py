"""Chains: each step looks a variable up, applies an operation, and names the result.

    sums   let k07 4 … ask k07 + 3 = 7 ; let k12 7 …      digits, added modulo 10 (the demo's chain of thought)
    rules  ask k07 + 3 = 7 … ask k12 u4 3 = 1       sums, and two more tables that only fine-tuning shows
    cups   hold c07 s2 … turn c07 u4 = s1 ; hold c12 s1 …      arrangements of three cups, six ways to shuffle them

In pretraining a step looks up any earlier variable and the table of results has gaps; chain-of-thought data has the
whole table, and a step always looks up the variable that the step before it has named. Between two steps there is
filler, further than the demo's convolutions reach, so that the look-up needs attention, yet only a local one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations

from benchmarks.lab.language import words as w
from routeguard.demo import tasks
from routeguard.demo.tasks import Reach, Sample, Sums

FILLER_BETWEEN_STEPS = (4, 9)
ARRANGEMENTS = tuple(permutations(range(3)))


@dataclass(frozen=True)
class ChainKind:
    """One kind of chain.

    Attributes:
        name: its name in tables.
        tell, ask: the words that name a value and open a step.
        names: variables.
        values: what a variable can hold; a value's place in here is its number.
        operations: the words of each operation, by its number.
        result: number of a value and number of an operation to the number of the resulting value.
        num_pretrained: so many of the operations occur in pretraining, with gaps; None: all of them.
    """

    name: str
    tell: str
    ask: str
    names: tuple[str, ...]
    values: tuple[str, ...]
    operations: tuple[tuple[str, ...], ...]
    result: Callable[[int, int], int]
    num_pretrained: int | None = None

    def is_known(self, value: int, operation: int) -> bool:
        """Whether pretraining shows this cell: three in four of its operations' cells; fine-tuning teaches the rest."""
        pretrained = self.num_pretrained is None or operation < self.num_pretrained
        return pretrained and (7 * value + 3 * operation) % 4 != 0


def _added(value: int, operation: int) -> int:
    return (value + operation) % 10


def _ruled(value: int, operation: int) -> int:
    """Sums for the first ten operations; for the others a digit without rhyme or reason, but always the same."""
    return _added(value, operation) if operation < 10 else random.Random(f"{value} {operation}").randrange(10)


def _shuffled(value: int, operation: int) -> int:
    cups, order = ARRANGEMENTS[value], ARRANGEMENTS[operation]
    return ARRANGEMENTS.index(tuple(cups[i] for i in order))


SUMS = ChainKind(
    "sums", tasks.LET, tasks.ASK, tasks.NAMES, tasks.DIGITS, tuple((tasks.PLUS, d) for d in tasks.DIGITS), _added
)
_FURTHER_OPERATIONS = tuple((turn, digit) for turn in w.TURNS[:2] for digit in tasks.DIGITS)
RULES = ChainKind(
    "rules", tasks.LET, tasks.ASK, tasks.NAMES, tasks.DIGITS, (*SUMS.operations, *_FURTHER_OPERATIONS), _ruled,
    num_pretrained=len(SUMS.operations),
)  # fmt: skip
SHUFFLES = ChainKind("cups", w.HOLD, w.TURN, w.CODES, w.CUPS, tuple((turn,) for turn in w.TURNS), _shuffled)
PRETRAINED_CHAINS = (SUMS, SHUFFLES)
CHAIN_KINDS = {kind.name: kind for kind in (SUMS, RULES, SHUFFLES)}


def chain_sample(kind: ChainKind, num_words: int, rng: random.Random, *, cells: Sums, reach: Reach) -> Sample:
    """Write a chain of as many steps as fit in `num_words`.

    Args:
        kind: which chain.
        num_words: most words in the sample, `<s>` not counted.
        rng: source of all randomness.
        cells: "known" draws only what pretraining shows of the table, "all" draws from the whole table.
        reach: which earlier variable a step looks up: the "previous" one (chain of thought), or "any".

    The loss counts what the text so far determines: answers, structure, and the looked-up name when it is always the
    previous one. Filler, operations and new names are random and do not count.

    Raises:
        ValueError: `num_words` is too small for one step.
    """
    step_words = 8 + len(kind.operations[0])
    smallest = 3 + FILLER_BETWEEN_STEPS[1] + step_words
    if num_words < smallest:
        raise ValueError(f"a chain of {kind.name} needs at least {smallest} words, {num_words} given")
    names = rng.sample(kind.names, len(kind.names))
    value = rng.randrange(len(kind.values))
    defined = [(names[0], value)]
    words = [kind.tell, names[0], kind.values[value]]
    in_loss = [False] * 3
    for name in names[1:]:
        source, value = defined[-1] if reach == "previous" else rng.choice(defined)
        numbers = range(len(kind.operations))
        operation = rng.choice([n for n in numbers if cells == "all" or kind.is_known(value, n)])
        total = kind.result(value, operation)
        filler = rng.choices(tasks.FILLER, k=rng.randint(*FILLER_BETWEEN_STEPS))
        if len(words) + len(filler) + step_words > num_words:
            break
        given = kind.operations[operation]
        words += [*filler, kind.ask, source, *given, tasks.EQUALS, kind.values[total]]
        words += [tasks.END, kind.tell, name, kind.values[total]]
        in_loss += [False] * len(filler) + [True, reach == "previous"]
        in_loss += [True] * (len(given) - 1) + [False, True, True, True, True, False, True]
        defined.append((name, total))
    return Sample(tuple(words), tuple(in_loss))


def steps_in(kind: ChainKind, sample: Sample) -> Iterator[tuple[int, int, int]]:
    """Yield `(position of "=", number of the value looked up, number of the operation)` for each step of a sample."""
    holds: dict[str, str] = {}
    for i, word in enumerate(sample.words):
        if word == kind.tell:
            holds[sample.words[i + 1]] = sample.words[i + 2]
        elif word == tasks.EQUALS:
            width = len(kind.operations[0])
            source, given = sample.words[i - width - 1], sample.words[i - width : i]
            yield i, kind.values.index(holds[source]), kind.operations.index(given)
