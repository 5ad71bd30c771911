"""Which conditions are run where, named in one place."""

from __future__ import annotations

from benchmarks.lab.conditions.table import CONDITIONS, NONE, QK

# Development on the main architecture and chain: everything.
MAIN: tuple[str, ...] = tuple(CONDITIONS)

# Fixed on development seeds and development needles of the main architecture, before any confirmation seed was run.
FIRST_CONFIRMED: tuple[str, ...] = (
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

# Chosen later, again on development seeds and needles of the main architecture alone: total 0.9 of three.
PULLS = ("l2_sp_0.9", "l2_sp_0.9+wise_ft_0.1", "l2_sp_0.9+replay_5", "l2_sp_0.9+replay_5+wise_ft_0.1")

CONFIRMED: tuple[str, ...] = (*FIRST_CONFIRMED, *PULLS)

# How far the averages go back is chosen for each architecture on its development seeds (`report.claims`).
AVERAGES = ("wise_ft_0.1", "wise_ft_0.25")
REPLAYED_AVERAGES = ("replay_5+wise_ft_0.1", "replay_5+wise_ft_0.25")

# Development elsewhere: what fine-tuning does, and how far averages may go back; no mode is chosen there.
ELSEWHERE: tuple[str, ...] = (NONE, QK, "interpolate_0.5", *AVERAGES, "replay_5", *REPLAYED_AVERAGES)

CONFIRMED_ELSEWHERE = tuple(
    dict.fromkeys(name for name in (*CONFIRMED, *AVERAGES, *REPLAYED_AVERAGES) if name != "freeze+replay_5")
)

QUICK: tuple[str, ...] = (
    NONE,
    QK,
    "v_restore",
    "wise_ft_0.1",
    "freeze",
    "l2_sp_0.9",
    "replay_5",
    "replay_5+wise_ft_0.1",
    "l2_sp_0.9+replay_5",
)
