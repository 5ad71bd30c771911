"""What one process of a sharded run holds, by formula: pure functions of shapes, held rows and the number of devices.

Mixed precision as both engines do it: 16-bit computation, float32 masters, AdamW. The states are counted as in the
ZeRO paper (arXiv 1910.02054, §3.1): 16 bytes a trained parameter. Activations and the engines' own buffers come on top
and are left out, so that every share given here is too high rather than too low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Engine = Literal["FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
Mode = Literal["freeze", "track", "low_lr", "anchor"]
Rows = tuple[tuple[int, int], ...]
Counts = NDArray[np.int64]

MASTER, HALF, MOMENTS = 4, 2, 8  # bytes an element: float32, 16 bits, AdamW's two float32 moments
BLOCK = 512  # what CUDA's allocator rounds every small tensor up to


@dataclass(frozen=True)
class Shape:
    """A parameter as the formulas see it.

    `held` are ranges along its first dimension: () for none of it, None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    held: Rows | None = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_held(self) -> bool:
        return self.held != ()

    @property
    def held_numel(self) -> int:
        return self.numel if self.held is None else sum(b - a for a, b in self.held) * (self.numel // self.shape[0])


def held_before(tensor: Shape, at: Counts) -> Counts:
    """How many of a tensor's first `at` entries (flattened) are held, for each entry of `at`."""
    width = tensor.numel // tensor.shape[0]
    ranges = ((0, tensor.shape[0]),) if tensor.held is None else tensor.held
    counts = np.zeros_like(at)
    for first, stop in ranges:
        counts += np.clip(at, first * width, stop * width) - first * width
    return counts


def stretches(tensors: Sequence[Shape], engine: Engine, devices: int) -> list[tuple[Counts, Counts]]:
    """For each tensor: where every process' part of it begins and ends in the flattened tensor.

    FSDP2 cuts the first dimension into pieces of equal size, the last ones shorter or empty. ZeRO-3 cuts the flattened
    tensor so. ZeRO-1 and 2 cut the flattened group, all these tensors one after the other, so.
    """
    rank = np.arange(devices, dtype=np.int64)
    total, offset, found = sum(tensor.numel for tensor in tensors), 0, []
    for tensor in tensors:
        if engine == "FSDP2":
            piece = -(-tensor.shape[0] // devices) * (tensor.numel // tensor.shape[0])
            begin = rank * piece
        elif engine == "ZeRO-3":
            piece = -(-tensor.numel // devices)
            begin = rank * piece
        else:
            piece = -(-total // devices)
            begin = rank * piece - offset
            offset += tensor.numel
        found.append((np.clip(begin, 0, tensor.numel), np.clip(begin + piece, 0, tensor.numel)))
    return found


def is_frozen(tensor: Shape, mode: Mode) -> bool:
    """Whether a mode takes the whole tensor out of the optimizer."""
    return mode == "freeze" and tensor.held is None


def masters_of(tensors: Sequence[Shape], mode: Mode) -> list[list[Shape]]:
    """The optimizer's groups: with and without weight decay, and routing apart where the mode gives it a group."""
    trained = [tensor for tensor in tensors if not is_frozen(tensor, mode)]
    routing = [t for t in trained if t.is_held] if mode in ("low_lr", "anchor") else []
    rest = [t for t in trained if t not in routing]
    groups = [[t for t in rest if len(t.shape) > 1], [t for t in rest if len(t.shape) == 1], routing]
    return [group for group in groups if group]


def state_bytes(tensors: Sequence[Shape], mode: Mode, engine: Engine, devices: int) -> Counts:
    """Bytes of parameters, gradients, masters and AdamW's moments in every process, `[devices]`."""
    frozen = [tensor for tensor in tensors if is_frozen(tensor, mode)]
    trained = np.zeros(devices, dtype=np.int64)
    for group in masters_of(tensors, mode):
        trained += sum(stop - begin for begin, stop in stretches(group, engine, devices))
    idle = np.zeros(devices, dtype=np.int64)
    if engine in ("FSDP2", "ZeRO-3"):
        idle += sum(stop - begin for begin, stop in stretches(frozen, engine, devices))
    whole = sum(tensor.numel for tensor in tensors)
    whole_trained = whole - sum(tensor.numel for tensor in frozen)
    if engine == "FSDP2":  # the parameter is its own master, and its gradient has its dtype
        return trained * (MASTER + MASTER + MOMENTS) + idle * MASTER
    if engine == "ZeRO-3":
        return trained * (HALF + HALF + MASTER + MOMENTS) + idle * HALF
    if engine == "ZeRO-2":
        return HALF * whole + trained * (HALF + MASTER + MOMENTS)
    return HALF * whole + HALF * whole_trained + trained * (MASTER + MOMENTS)


def start_bytes(tensors: Sequence[Shape], mode: Mode, engine: Engine, devices: int) -> Counts:
    """Bytes of the start that the guard keeps beside the parameters in every process, `[devices]`.

    Freezing keeps the held rows of tensors that also have others, and nothing of whole tensors. Every other mode
    measures drift, and so keeps all held rows, in the dtype of the masters.
    """
    kept = np.zeros(devices, dtype=np.int64)
    for group in masters_of(tensors, mode):
        for tensor, (begin, stop) in zip(group, stretches(group, engine, devices), strict=True):
            if tensor.is_held:
                kept += held_before(tensor, stop) - held_before(tensor, begin)
    return kept * MASTER


def queue_bytes(cells: int, steps: int, *, block: int = BLOCK) -> int:
    """Bytes of the drift of some steps that wait on the device for the next log line: float32, one tensor a step."""
    return steps * -(-4 * cells // block) * block


def sidecar_bytes(tensors: Sequence[Shape], engine: Engine) -> int:
    """Bytes of the start of all held rows: the first process' copy in host memory, and the file beside the run.

    FSDP2 hands out float32, ZeRO its 16-bit parameters.
    """
    return sum(tensor.held_numel for tensor in tensors) * (MASTER if engine == "FSDP2" else HALF)


def capture_peak(tensors: Sequence[Shape], engine: Engine) -> int:
    """Bytes on the device while the start is captured, one tensor at a time: it whole, and its held rows beside it.

    Under ZeRO-3 also the copy that outlives the gathering; under ZeRO-1 and 2 the whole tensor is there anyway.
    """
    whole = {"FSDP2": MASTER, "ZeRO-3": HALF + HALF, "ZeRO-1": 0, "ZeRO-2": 0}[engine]
    rows = MASTER if engine == "FSDP2" else HALF
    held = [tensor for tensor in tensors if tensor.is_held]
    return max(
        (tensor.numel * whole + (0 if tensor.held is None else tensor.held_numel * rows) for tensor in held), default=0
    )


def engine_peak(tensors: Sequence[Shape]) -> int:
    """Bytes of the largest tensor in 16 bits, which FSDP2 and ZeRO-3 gather whole in every step, guarded or not."""
    return HALF * max(tensor.numel for tensor in tensors)


def log_traffic(cells: int, steps: int, devices: int) -> float:
    """Bytes that a process sends in the one all-reduce of a log line (ring: 2 (N - 1) / N of the message)."""
    return 4 * cells * steps * 2 * (devices - 1) / devices


def start_traffic(tensors: Sequence[Shape], engine: Engine, devices: int) -> float:
    """Bytes that a process receives once, at the start, while each held tensor is gathered."""
    size = {"FSDP2": MASTER, "ZeRO-3": HALF, "ZeRO-1": 0, "ZeRO-2": 0}[engine]
    return size * sum(tensor.numel for tensor in tensors if tensor.is_held) * (devices - 1) / devices
