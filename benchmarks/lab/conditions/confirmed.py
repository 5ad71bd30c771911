"""The conditions that go into the confirmation, fixed on development seeds and development needles beforehand."""

from __future__ import annotations

CONFIRMED: tuple[str, ...] = ("none", "qk_restore", "q_restore", "k_restore", "v_restore", "freeze")
