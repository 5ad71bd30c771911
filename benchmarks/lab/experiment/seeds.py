"""Which seeds choose, and which confirm. They are never the same."""

from __future__ import annotations

from typing import Literal

Purpose = Literal["development", "confirmation"]

DEVELOPMENT_SEEDS = (0, 1, 2)
CONFIRMATION_SEEDS = (100, 101, 102, 103, 104)
# For all experiments but the main one. Bamba's first look at 100 came before the averages' rule was fixed.
CONFIRMATION_SEEDS_ELSEWHERE = CONFIRMATION_SEEDS[1:4]


def confirmation_seeds(is_main: bool) -> tuple[int, ...]:
    """The seeds that confirm, for the main experiment or for another one."""
    return CONFIRMATION_SEEDS if is_main else CONFIRMATION_SEEDS_ELSEWHERE


def purpose_of(seed: int) -> Purpose:
    """What a seed is for. Raises ValueError for one that is in neither set."""
    if seed in DEVELOPMENT_SEEDS:
        return "development"
    if seed in CONFIRMATION_SEEDS:
        return "confirmation"
    raise ValueError(
        f"seed {seed} is neither one of development {DEVELOPMENT_SEEDS} nor of confirmation {CONFIRMATION_SEEDS}"
    )
