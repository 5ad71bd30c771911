"""Check that frozen rows have not moved, without keeping a copy of whole frozen tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.protect.freeze import Frozen
from routeguard.protect.held import Held
from routeguard.protect.rows import take_rows
from routeguard.sharding.zero import published
from routeguard.training.four_bit import code_fingerprint, is_repackable

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """The 64-bit sum of a tensor's entries read as integers: any single changed entry changes it.

    A 0-d tensor on the device. It detects training, not an attack. That of a 4-bit weight does not depend on the order
    in which its entries are stored.
    """
    if is_repackable(tensor):
        return code_fingerprint(tensor)
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


class Stillness:
    """Fingerprints of everything frozen, taken now; `check` compares."""

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen
        self._still = [*frozen.whole, *frozen.before]
        self._marks = self._fingerprints()

    def _fingerprints(self) -> list[tuple[Held, Tensor]]:
        still = [(held, fingerprint(held.parameter)) for held in self._still]
        return still + [(held, fingerprint(rows)) for held in self._frozen.rows for rows in published(held)]

    def check(self) -> None:
        """Raise RuntimeError, naming the tensor, if a frozen one changed or became trainable. Waits for the device."""
        self._frozen.freeze_again()
        for held in self._still:
            if held.trainable:
                raise RuntimeError(
                    f"{held.name} was frozen and is trainable again: something unfroze it during training"
                )
        marks = zip(self._fingerprints(), self._marks, strict=True)
        same = [(held, now == then) for (held, now), (_, then) in marks]
        same += [(held, self._rows_same(held)) for held in self._frozen.rows]
        if same and not all(torch.stack([value.cpu() for _, value in same]).tolist()):
            moved = next(held for held, value in same if not value)
            raise RuntimeError(
                f"{moved.name} is held and changed all the same: another callback, EMA or a custom step writes to it"
            )

    def _rows_same(self, held: Held) -> Tensor:
        return (take_rows(held.parameter.detach(), held.rows, held.dim) == self._frozen.start[held.name]).all()
