"""RULER's variable tracking: a value is handed from variable to variable, and all of them are asked for."""

from __future__ import annotations

import itertools
import random
import string
from dataclasses import dataclass
from typing import ClassVar

from routeguard.recall import templates
from routeguard.recall.key_words import Split, draw_letters, draw_number
from routeguard.recall.needles import cut_lines
from routeguard.recall.task import Draft, Material, Rendered, place

_VALUES = (10_000, 99_998)
_EXAMPLE_NOISES = 10  # sentences of noise in the worked example


@dataclass(frozen=True)
class VariableTask:
    """`VAR A = 12345 ... VAR B = VAR A ...`: which variables hold 12345? (RULER, arXiv 2404.06654, section 3).

    Args:
        name: what results call it.
        num_hops: how often the value is handed on; `num_hops + 1` variables are asked for.
        example: whether a worked example stands before the question, as in RULER (about 350 tokens).
    """

    name: str = "vt"
    num_hops: int = 4
    example: bool = True
    joiner: str = ""
    uses_haystack: ClassVar[bool] = False

    def draft(self, rng: random.Random, material: Material, depth: float | None) -> Draft:
        names = _variables(rng, self.num_hops + 1, 5, material.split)
        value = draw_number(rng, *_VALUES, material.split)
        places = sorted(rng.random() for _ in names)
        if depth is not None:
            places[0] = depth
            places[1:] = sorted(depth + (1 - depth) * rng.random() for _ in places[1:])
        return _VariableDraft(
            answers=tuple(names),
            value=value,
            places=tuple(places),
            example=_example(rng, self.num_hops, material.split) if self.example else "",
        )


@dataclass(frozen=True)
class _VariableDraft:
    answers: tuple[str, ...]
    value: str
    places: tuple[float, ...]
    example: str

    @property
    def answer_prefix(self) -> str:
        return templates.CHAIN_PREFIX.format(num_v=len(self.answers), query=self.value)

    def render(self, num_words: int, extra: str = "") -> Rendered:
        context, depths = _context(self.answers, self.value, self.places, num_words)
        turn = "\n".join((templates.CHAIN_INTRO, context + extra, templates.CHAIN_QUESTION.format(query=self.value)))
        return Rendered((self.example + turn,), tuple(depths))


def _context(names: tuple[str, ...], value: str, places: tuple[float, ...], num_words: int) -> tuple[str, list[float]]:
    """Noise with the assignments in it. Each sentence of noise ends its line; assignments stand in the line."""
    lines = [f"{line}\n" for line in cut_lines(num_words, templates.NOISE)]
    hops = [templates.CHAIN_START.format(name=names[0], value=value)]
    hops += [templates.CHAIN_HOP.format(name=name, before=before) for before, name in itertools.pairwise(names)]
    return place(lines, list(zip(places, hops, strict=True)), " ")


def _example(rng: random.Random, num_hops: int, split: Split) -> str:
    """A question with its answer, as RULER puts it first: the same form, three-letter names."""
    names = tuple(_variables(rng, num_hops + 1, 3, split))
    value = draw_number(rng, *_VALUES, split)
    noise_words = len(templates.NOISE.split()) * _EXAMPLE_NOISES
    context, _ = _context(names, value, tuple(sorted(rng.random() for _ in names)), noise_words)
    question = templates.CHAIN_QUESTION.format(query=value)
    prefix = templates.CHAIN_PREFIX.format(num_v=len(names), query=value)
    # RULER's prefix ends in a blank, and one more stands before the answer.
    return f"{templates.CHAIN_INTRO}\n{context}\n{question} {prefix}  {' '.join(names)}\n\n\n\n"


def _variables(rng: random.Random, count: int, letters: int, split: Split) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        name = draw_letters(rng, string.ascii_uppercase, letters, split)
        if name not in names:
            names.append(name)
    return names
