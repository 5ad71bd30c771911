"""How PEFT's adapters begin, as their configs spell it. No torch."""

from __future__ import annotations

# `init_lora_weights` after which B is zero, so that a fresh adapter changes nothing (not so: PiSSA, OLoRA, LoftQ).
ZERO_B_INITS = (True, "gaussian", "eva")
