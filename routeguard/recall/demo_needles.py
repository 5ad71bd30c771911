"""The demo's needles in the demo's toy language, for the tiny hybrid that ships with the package."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from routeguard.recall.key_words import Split
from routeguard.recall.task import Draft, Material, Rendered, place

NUM_NEEDLES = 6


@dataclass(frozen=True)
class DemoNeedles:
    """`let k07 4 2 ... filler ... ask k07`: two digits, six names hidden, one of them asked for.

    Its words are those of `routeguard.demo.tasks`: only the demo's tokenizer knows them.
    """

    name: str = "demo_needles"
    num_needles: int = NUM_NEEDLES
    joiner: str = ""
    uses_haystack: ClassVar[bool] = False

    def draft(self, rng: random.Random, material: Material, depth: float | None) -> Draft:
        from routeguard.demo.tasks import DIGITS, NAMES

        names = rng.sample(_names_of(NAMES, material.split), self.num_needles)
        values = [f"{rng.choice(DIGITS)} {rng.choice(DIGITS)}" for _ in names]
        depths = [rng.random() for _ in names]
        if depth is not None:
            depths[0] = depth
        return _DemoDraft(tuple(names), tuple(values), tuple(depths), rng.getrandbits(64))


@dataclass(frozen=True)
class _DemoDraft:
    names: tuple[str, ...]
    values: tuple[str, ...]
    depths: tuple[float, ...]
    filler_seed: int

    @property
    def answers(self) -> tuple[str, ...]:
        return self.values[:1]

    @property
    def answer_prefix(self) -> str:
        return f"ask {self.names[0]}"

    def render(self, num_words: int, extra: str = "") -> Rendered:
        from routeguard.demo.tasks import FILLER

        filler = random.Random(self.filler_seed).choices(FILLER, k=num_words)
        needles = [
            (depth, f"let {name} {value}")
            for depth, name, value in zip(self.depths, self.names, self.values, strict=True)
        ]
        context, depths = place(filler, needles, " ")
        return Rendered((context + extra,), (depths[0],), frozenset(self.values[1:]) - {self.values[0]})


def _names_of(names: tuple[str, ...], split: Split) -> tuple[str, ...]:
    return names[0::2] if split == "measure" else names[1::2]
