"""Names and values for needles, in two halves, so that what training replays is never probed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Literal

Split = Literal["measure", "replay"]

ADJECTIVES = tuple(
    """
    agile amber ancient bitter blazing bold brave brisk broken calm careful cheerful clever cold crisp curious
    daring dizzy dusty eager early faint fancy fearless fierce frosty gentle giant golden graceful grim happy
    heavy hollow humble icy idle jolly keen kind lazy little lively lonely loud lucky mellow mighty misty modest
    muddy narrow noble odd patient plain polite proud quick quiet rapid rare rough rusty secret shiny shy silent
    simple sleepy slim small smooth solid stern strange swift tame tender tidy tiny vast vivid warm wild wise
    witty young zesty
    """.split()  # noqa: SIM905
)
NOUNS = tuple(
    """
    anchor apple arrow badge bakery banjo barrel basket beacon bell bicycle blanket boat bottle bridge bucket
    cabin camera candle canyon carpet castle cellar chapel cherry circus clock cloud compass copper cottage
    cradle crystal curtain diary dolphin drum eagle engine falcon feather ferry fiddle flute forest fountain
    garden gate glacier goblet hammer harbor helmet island jacket kettle kitchen ladder lantern lemon library
    lobster locket magnet market meadow mirror mitten monkey museum needle notebook ocean orchard otter oven
    paddle palace panda parrot pebble pencil piano pillow pirate planet pocket pond puzzle rabbit ribbon river
    rocket saddle sailor sandal shovel signal sparrow spoon stable station statue stove tailor teapot temple
    ticket tiger tower tractor trumpet tunnel turtle valley velvet village violin wagon walnut whale whistle
    window winter wizard
    """.split()  # noqa: SIM905
)
_NOUNS_OF: dict[Split, tuple[str, ...]] = {"measure": NOUNS[0::2], "replay": NOUNS[1::2]}


def draw_words(rng: random.Random, split: Split) -> str:
    """One name, such as `brisk-otter`; the nouns of the two splits are disjoint."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(_NOUNS_OF[split])}"


def draw_number(rng: random.Random, low: int, high: int, split: Split) -> str:
    """A number from `low` to `high`, both included; those of the two splits are disjoint."""
    return _draw_half(lambda: str(rng.randint(low, high)), split)


def draw_uuid(rng: random.Random, split: Split) -> str:
    """A random UUID (version 4); those of the two splits are disjoint."""
    return _draw_half(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)), split)


def draw_letters(rng: random.Random, letters: str, count: int, split: Split) -> str:
    """A name of `count` of the letters; those of the two splits are disjoint."""
    return _draw_half(lambda: "".join(rng.choices(letters, k=count)), split)


def half_of(text: str) -> Split:
    """Which split a number, UUID or variable belongs to: that with an even sum of its characters' codes is measured.

    The sum hangs on every character, so that no single digit or letter tells the halves apart.
    """
    return "replay" if sum(map(ord, text)) % 2 else "measure"


def _draw_half(draw: Callable[[], str], split: Split) -> str:
    while half_of(drawn := draw()) != split:
        pass
    return drawn
