"""Which conditions are run where, named in one place."""

from __future__ import annotations

from benchmarks.lab.conditions.table import CONDITIONS, NONE, QK

# Development on the main architecture and chain: everything. On the others: what was informative there.
MAIN: tuple[str, ...] = tuple(CONDITIONS)
ELSEWHERE: tuple[str, ...] = (
    NONE,
    QK,
    "q_restore",
    "k_restore",
    "v_restore",
    "qkvo_restore",
    "interpolate_0.5",
    "wise_ft_0.1",
    "wise_ft_0.25",
    "freeze",
    "replay_5",
    "replay_5+restore",
    "replay_5+wise_ft_0.1",
    "freeze+replay_5",
    "settle_0.8+replay_5",
)

# Fixed on development seeds and development needles, before any confirmation seed was run.
CONFIRMED: tuple[str, ...] = (NONE, QK, "q_restore", "k_restore", "v_restore", "freeze")

QUICK: tuple[str, ...] = (NONE, QK, "v_restore", "wise_ft_0.1", "freeze", "replay_5", "replay_5+restore")
