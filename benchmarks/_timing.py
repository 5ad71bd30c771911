"""Interleaved timing: every function runs once in each round, so a busy moment of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Timings:
    """Seconds of each function in each round. All lists have the same length."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        return median(self.seconds[name])

    def ratio(self, name: str, floor: str) -> float:
        """Median over rounds of the ratio within a round."""
        return median(self._ratios(name, floor))

    def spread(self, name: str, floor: str) -> tuple[float, float]:
        """The middle half of the ratios."""
        lower, _, upper = quantiles(self._ratios(name, floor), n=4)
        return lower, upper

    def _ratios(self, name: str, floor: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[floor], strict=True)]


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    device: str = "cpu",
    clock: str = "wall",
) -> Timings:
    """Time the functions in rounds, each round starting with another one of them.

    Args:
        functions: what to run, by name.
        rounds: measured rounds, at least 2. Default none.
        warmup: rounds before the measurement, not counted. Default 3.
        device: "cpu" or "cuda". On CUDA, events are recorded around each call and read after the last round.
        clock: "wall", or "cpu" for the time this process was computing. The latter ignores other processes, but is
            meaningful for one thread only. CUDA events ignore it.

    Raises:
        ValueError: fewer than 2 rounds, or an unknown clock.
    """
    if rounds < 2:
        raise ValueError(f"a median needs at least 2 rounds, found {rounds}")
    if clock not in CLOCKS:
        raise ValueError(f"unknown clock {clock!r}; known: {', '.join(CLOCKS)}")
    for _ in range(warmup):
        for function in functions.values():
            function()
    names = list(functions)
    measure = _cuda_seconds if device == "cuda" else _host_seconds
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for at in range(rounds):
        shift = at % len(names)
        for name in names[shift:] + names[:shift]:
            pending[name].append(measure(functions[name], CLOCKS[clock]))
    if device == "cuda":
        torch.cuda.synchronize()
    return Timings({name: tuple(read() for read in reads) for name, reads in pending.items()})


@contextmanager
def host_synchronisation_forbidden() -> Iterator[None]:
    """On CUDA any call that waits for the device raises inside; the previous mode is put back."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _host_seconds(function: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    begin = clock()
    function()
    seconds = clock() - begin
    return lambda: seconds


def _cuda_seconds(function: Callable[[], object], _: Callable[[], float]) -> Callable[[], float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    return lambda: begin.elapsed_time(end) / 1000
