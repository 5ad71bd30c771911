"""Named choices of protection and of what is done at the end, by what they put first."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal, NamedTuple

from routeguard.protect.modes import L2SP, AtEnd, Average, Freeze, Protection, Track, as_at_end, as_protection

RecipeName = Literal["balanced", "max_recall", "max_reasoning"]


class Recipe(NamedTuple):
    """What the guard does while training, and at its end."""

    protect: Protection
    restore: AtEnd | None


# Chosen by docs/evidence: on the small hybrids there, a pull on every weight gave more recall for less reasoning than
# averaging at the end, and both more than any treatment of queries and keys.
RECIPES: Mapping[RecipeName, Recipe] = {
    "balanced": Recipe(L2SP(0.9), None),
    "max_recall": Recipe(L2SP(0.9), Average(0.1)),
    "max_reasoning": Recipe(Track(), None),
}


def find_recipe(name: str) -> Recipe:
    """A recipe by its name. Raises ValueError, with the nearest and all of them, for another."""
    for known, recipe in RECIPES.items():
        if name == known:
            return recipe
    close = get_close_matches(str(name), RECIPES, n=1)
    hint = f"; closest {close[0]!r}" if close else ""
    raise ValueError(f"recipe={name!r} is not understood{hint}; choose from {', '.join(map(repr, RECIPES))}")


def choose(
    protect: str | Protection | None = None, restore: str | AtEnd | None = None, recipe: str | None = None
) -> Recipe:
    """What a guard was asked to do: a recipe, or its two parts by name or object (no protection named: `Freeze()`).

    Raises ValueError for names that are not understood, a recipe beside its parts, and a restore of what is frozen.
    """
    if recipe is not None:
        if protect is not None or restore is not None:
            raise ValueError(
                f"recipe={recipe!r} chooses protect and restore itself; found protect={protect!r}, "
                f"restore={restore!r}. Give the recipe alone, or the two without it"
            )
        return find_recipe(recipe)
    chosen = Recipe(as_protection("freeze" if protect is None else protect), as_at_end(restore))
    if isinstance(chosen.protect, Freeze) and not isinstance(chosen.restore, Average | None):
        raise ValueError(
            "Freeze() with restore= is meaningless: frozen queries and keys have nothing to be restored from. Use "
            "RouteGuard() or RouteGuard(protect=Track(), restore=QKRestore())"
        )
    return chosen
