"""bitsandbytes' 4-bit weights, which some CPUs lay out anew when a model is evaluated.

A CPU with bf16 instructions packs them at the first evaluation, for a kernel without gradients: adapters below a packed
layer train on without its part of their gradient, and saving unpacks the weights with coarser scales.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.recall.quiet import REPACKS
from routeguard.routes.wording import first_of

# A number for each of the 16 codes: changes of several entries that would cancel in their plain sum do not here.
_MARKS = [pow(0x9E3779B97F4A7C15, code + 1, 1 << 63) for code in range(16)]


class StaysUnpacked:
    """From now until `release()`, evaluating a model packs none of its 4-bit weights."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[Any] = [module for module in model.modules() if getattr(module, REPACKS, False)]
        self._allow(False)

    def release(self) -> None:
        self._allow(True)

    def _allow(self, packing: bool) -> None:
        for layer in self._layers:
            setattr(layer, REPACKS, packing)


def warn_of_packed(model: nn.Module) -> None:
    """Warn if weights of a model that is about to be trained are packed already."""
    packed = [
        name
        for name, parameter in model.named_parameters()
        if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False)
    ]
    if packed:
        warnings.warn(
            f"{first_of(packed)} was packed for inference when the model was evaluated on this "
            "CPU, before it had a guard. bitsandbytes has no gradient for packed weights, so adapters below them train "
            "wrongly: load the model again, and evaluate it after RouteGuard was given to its Trainer",
            UserWarning,
            stacklevel=2,
        )


def is_repackable(tensor: Tensor) -> bool:
    """Whether it is a 4-bit weight on a CPU: the order of its entries may change although none of them does."""
    return tensor.is_cpu and getattr(tensor, "quant_state", None) is not None


def code_fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit number, 0-d, of how often each 4-bit code occurs: changing one entry changes it, packing does not."""
    entries = tensor.detach().contiguous().view(torch.uint8).flatten()
    pairs = torch.bincount(entries, minlength=256).view(16, 16)
    return ((pairs.sum(0) + pairs.sum(1)) * torch.tensor(_MARKS)).sum()
