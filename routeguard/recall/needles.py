"""RULER's needle-in-a-haystack tasks: one value or several, among noise, prose, or lines that look the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from routeguard.recall import templates
from routeguard.recall.key_words import Split, draw_number, draw_uuid, draw_words
from routeguard.recall.task import Draft, Material, Rendered, place

Filling = Literal["noise", "prose", "needles"]
Keys = Literal["words", "uuids"]
Values = Literal["numbers", "uuids"]

DEPTHS = tuple(i / 39 for i in range(40))  # RULER's grid
_WORDS_A_NEEDLE = len(templates.NEEDLE.split())


@dataclass(frozen=True)
class NeedleTask:
    """Values hidden in a text, some of them asked for (RULER, arXiv 2404.06654, section 3 and appendix B).

    Args:
        name: what results call it.
        filling: what the haystack is: "noise" (one sentence repeated), "prose", or "needles" (a value in every line).
        keys: names as "words" or "uuids".
        values: 7-digit "numbers" or "uuids".
        num_keys: how many names are hidden.
        num_values: values a name.
        num_queries: how many of the names are asked for.

    Raises ValueError for counts below 1 and more queries than keys.
    """

    name: str
    filling: Filling = "prose"
    keys: Keys = "words"
    values: Values = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    joiner: str = ","

    def __post_init__(self) -> None:
        if min(self.num_keys, self.num_values, self.num_queries) < 1 or self.num_queries > self.num_keys:
            raise ValueError(
                f"{self.name}: {self.num_queries} queries of {self.num_keys} keys with {self.num_values} values; "
                "each must be at least 1, and no more queries than keys"
            )

    @property
    def uses_haystack(self) -> bool:
        return self.filling == "prose"

    def draft(self, rng: random.Random, material: Material, depth: float | None) -> Draft:
        keys = _distinct(rng, self.keys, self.num_keys, material.split)
        values = _distinct(rng, self.values, self.num_keys * self.num_values, material.split)
        hidden = [(key, values[i * self.num_values + j]) for i, key in enumerate(keys) for j in range(self.num_values)]
        queries = rng.sample(keys, self.num_queries)
        depths = [rng.choice(DEPTHS) for _ in hidden]
        if depth is not None:
            depths[hidden.index(next(pair for pair in hidden if pair[0] == queries[0]))] = depth
        asked = [
            i
            for query in queries
            for i in sorted((i for i, (key, _) in enumerate(hidden) if key == query), key=lambda i: (depths[i], i))
        ]
        return _NeedleDraft(
            task=self,
            hidden=tuple(hidden),
            depths=tuple(depths),
            asked=tuple(asked),
            queries=tuple(queries),
            material=material,
            start=material.haystack.start(rng),
            line_seed=rng.getrandbits(64),
        )


@dataclass(frozen=True)
class _NeedleDraft:
    task: NeedleTask
    hidden: tuple[tuple[str, str], ...]
    depths: tuple[float, ...]
    asked: tuple[int, ...]
    queries: tuple[str, ...]
    material: Material
    start: int
    line_seed: int

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(self.hidden[i][1] for i in self.asked)

    @property
    def answer_prefix(self) -> str:
        return self._fill(templates.PREFIX_ONE if self._single else templates.PREFIX_MANY)

    @property
    def _single(self) -> bool:
        return len(self.asked) == 1

    def _fill(self, template: str) -> str:
        kind = self.task.values[:-1] if self._single else self.task.values
        *first, last = self.queries
        return template.format(type_needle_v=kind, query=f"{', '.join(first)}, and {last}" if first else last)

    def render(self, num_words: int, extra: str = "") -> Rendered:
        pieces, others, glued = self._pieces(num_words)
        separator = " " if self.task.filling == "prose" else "\n"
        needles = [
            (depth, templates.NEEDLE.format(type_needle_v=self.task.values, key=key, value=value))
            for depth, (key, value) in zip(self.depths, self.hidden, strict=True)
        ]
        context, depths = place(pieces, needles, separator, glued)
        single = self._single
        turn = "\n".join(
            (
                self._fill(templates.INTRO_ONE if single else templates.INTRO_MANY),
                context + extra,
                self._fill(templates.QUESTION_ONE if single else templates.QUESTION_MANY),
            )
        )
        others |= {value for i, (_, value) in enumerate(self.hidden) if i not in self.asked}
        return Rendered((turn,), tuple(depths[i] for i in self.asked), frozenset(others))

    def _pieces(self, num_words: int) -> tuple[list[str], set[str], frozenset[int]]:
        """Sentences or lines of `num_words` words together (the last may be cut), the values that they hide, and which
        of them no blank follows."""
        if self.task.filling == "prose":
            pieces, glued = self.material.haystack.pieces(num_words, self.start)
            return pieces, set(), glued
        if self.task.filling == "noise":
            return cut_lines(num_words, templates.NOISE), set(), frozenset()
        rng, split = random.Random(self.line_seed), self.material.split
        taken = {key for key, _ in self.hidden}
        lines, others = [], set()
        for left in range(num_words, 0, -_WORDS_A_NEEDLE):
            key, value = _draw(rng, self.task.keys, split), _draw(rng, self.task.values, split)
            while key in taken:
                key = _draw(rng, self.task.keys, split)
            line = templates.NEEDLE.format(type_needle_v=self.task.values, key=key, value=value)
            if left >= _WORDS_A_NEEDLE:
                others.add(value)
                lines.append(line)
            else:  # a cut line goes first: at the end it would read like a question
                lines.insert(0, " ".join(line.split()[:left]))
        return lines, others, frozenset()


def cut_lines(num_words: int, line: str) -> list[str]:
    """`line` over and over until there are `num_words` words, the last one cut."""
    words = line.split()
    whole, rest = divmod(num_words, len(words))
    return [line] * whole + ([" ".join(words[:rest])] if rest else [])


def _draw(rng: random.Random, kind: Keys | Values, split: Split) -> str:
    if kind == "words":
        return draw_words(rng, split)
    if kind == "numbers":
        return draw_number(rng, 10**6, 10**7 - 1, split)
    return draw_uuid(rng, split)


def _distinct(rng: random.Random, kind: Keys | Values, count: int, split: Split) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        drawn = _draw(rng, kind, split)
        if drawn not in found:
            found.append(drawn)
    return found
