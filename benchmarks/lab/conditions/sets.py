"""Which conditions are run where, named in one place."""

from __future__ import annotations

from benchmarks.lab.conditions.table import CONDITIONS, NONE, QK

# Development on the main architecture and chain: everything.
MAIN: tuple[str, ...] = tuple(CONDITIONS)

# Fixed on development seeds and development needles of the main architecture, before any confirmation seed was run.
CONFIRMED: tuple[str, ...] = (
    NONE,
    QK,
    "q_restore",
    "k_restore",
    "v_restore",
    "qkvo_restore",
    "heads_2_restore",
    "interpolate_0.5",
    "wise_ft_0.1",
    "freeze",
    "replay_5",
    "replay_5+restore",
    "replay_5+interpolate_0.5",
    "replay_5+wise_ft_0.1",
    "freeze+replay_5",
)

# Development elsewhere: nothing is chosen there, this is for a look at what fine-tuning does.
ELSEWHERE: tuple[str, ...] = (NONE, QK, "interpolate_0.5", "wise_ft_0.1", "wise_ft_0.25")

QUICK: tuple[str, ...] = (NONE, QK, "v_restore", "wise_ft_0.1", "freeze", "replay_5", "replay_5+wise_ft_0.1")
