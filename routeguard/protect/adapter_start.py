"""Which tensors of adapters to move when the whole adapter is to go back towards its start."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_FACTOR = re.compile(r"\.lora_(embedding_)?(?P<factor>[AB])\.")
_PARTNER = {"A": "B", "B": "A"}
ZERO_FACTORS = (".lora_B.", ".lora_embedding_A.")  # which PEFT starts at zero, unless another init is asked for


def left_free(starts: Mapping[str, Tensor]) -> set[str]:
    """Names of the LoRA factors that need not go back, since their partner starts at zero.

    What the adapter adds is s·B·A. With B at zero at the start, that is zero, and scaling B by `1 − c` scales the
    product by exactly that, whatever A is (derived). Where both start elsewhere (PiSSA, an adapter that is trained
    further), both have to go back.

    Args:
        starts: the start of every trained tensor, by a name that ends as in the model
            (`….lora_B.default.weight`, `….lora_embedding_A.default`).
    """
    free = set()
    for name, start in starts.items():
        match = _FACTOR.search(name)
        if match is None:
            continue
        at = match.start("factor")
        partner = starts.get(name[:at] + _PARTNER[name[at]] + name[at + 1 :])
        if partner is not None and start.any() and not partner.any():
            free.add(name)
    return free
