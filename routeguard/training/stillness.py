"""Check that frozen rows have not moved, without keeping a copy of whole frozen tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.protect.freeze import Frozen
from routeguard.protect.rows import take_rows

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Two 64-bit sums over a tensor's bits (plain, and weighted by position): a changed entry changes them.

    Shape [2], on the device. Not cryptographic; it detects training, not attack.
    """
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten().to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int64)
    return torch.stack([bits.sum(), (bits * weights).sum()])


class Stillness:
    """Fingerprints of everything frozen, taken now; `check` compares."""

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen
        self._marks = {held.name: fingerprint(held.parameter) for held in frozen.whole}

    def check(self) -> None:
        """Raise RuntimeError, naming the tensor, if a frozen one changed or can be trained again. Synchronises."""
        for held in self._frozen.whole:
            if held.parameter.requires_grad:
                raise RuntimeError(
                    f"{held.name} was frozen and is trainable again: something unfroze it during training"
                )
            if not torch.equal(fingerprint(held.parameter), self._marks[held.name]):
                raise RuntimeError(
                    f"{held.name} is frozen and changed all the same: another callback, EMA or a custom step "
                    "writes to it"
                )
        for held in self._frozen.rows:
            if not torch.equal(take_rows(held.parameter.detach(), held.rows, held.dim), self._frozen.start[held.name]):
                raise RuntimeError(
                    f"held rows of {held.name} changed all the same: something writes to them after the step"
                )
