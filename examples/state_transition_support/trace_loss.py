"""Loss on the words of held-out traces, by how many steps a trace has, for every way of reading it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from state_transition_support.evicting import EvictingLayer, evicting_in_one_pass

IGNORED = -100
MOST_STEPS = 4  # traces of so many steps and more are counted together


@dataclass(frozen=True)
class MarkedTrace:
    """One trace: token ids with step tokens, its prompt, and which of them start and end steps."""

    ids: tuple[int, ...]
    prompt: int
    start_ids: tuple[int, ...]
    end_id: int

    @property
    def words(self) -> Tensor:
        """[tokens], whether it is a word of the completion (no step token)."""
        ids, place = torch.tensor(self.ids), torch.arange(len(self.ids))
        return (place >= self.prompt) & ~torch.isin(ids, torch.tensor([*self.start_ids, self.end_id]))

    @property
    def step(self) -> Tensor:
        """[tokens], the number of a token's step, from 1; 0 in the prompt."""
        return torch.isin(torch.tensor(self.ids), torch.tensor(self.start_ids)).cumsum(0)

    @property
    def num_steps(self) -> int:
        return int(self.step[-1])

    @property
    def longest_step(self) -> int:
        """Tokens of it, step tokens counted."""
        return int(torch.bincount(self.step)[1:].max())

    @property
    def plain(self) -> Tensor:
        """[1, tokens], the text without step tokens."""
        kept = self.words | (torch.arange(len(self.ids)) < self.prompt)
        return torch.tensor(self.ids)[kept][None]


Read = Callable[[MarkedTrace], Tensor]  # a trace -> the loss of each of its words, nats


def _losses(logits: Tensor, ids: Tensor, counted: Tensor) -> Tensor:
    """Of the tokens counted: logits [tokens, vocabulary], ids and `counted` [tokens]."""
    targets = torch.where(counted, ids, IGNORED)[1:]
    found = functional.cross_entropy(logits[:-1].float(), targets, reduction="none", ignore_index=IGNORED)
    return found[counted[1:]]


def plain_reading(model: Any) -> Read:
    """As the base model reads text: full attention, no step tokens."""

    def read(trace: MarkedTrace) -> Tensor:
        ids = trace.plain
        logits = model(input_ids=ids, use_cache=False).logits[0]
        return _losses(logits, ids[0], torch.arange(ids.shape[1]) >= trace.prompt)

    return read


def evicting_reading(model: Any, kind: type[EvictingLayer]) -> Read:
    """As plain, with as many places as prompt and longest step take: what the converted model keeps of keys."""

    def read(trace: MarkedTrace) -> Tensor:
        ids = trace.plain
        places = trace.prompt + trace.longest_step
        with evicting_in_one_pass(model, kind, places, ids.shape[1]) as arguments:
            logits = model(input_ids=ids, use_cache=False, **arguments).logits[0]
        return _losses(logits, ids[0], torch.arange(ids.shape[1]) >= trace.prompt)

    return read


def marked_reading(model: Any) -> Read:
    """As a converted model reads text, with step tokens."""

    def read(trace: MarkedTrace) -> Tensor:
        ids = torch.tensor(trace.ids)
        return _losses(model(input_ids=ids[None], use_cache=False).logits[0], ids, trace.words)

    return read


def forgetful_reading(model: Any) -> Read:
    """The same, with nothing remembered: each step is read as if it were the first, at the positions that it has.

    The mask of ones says that a gap between positions is no border between packed texts.
    """

    def read(trace: MarkedTrace) -> Tensor:
        ids, found = torch.tensor(trace.ids), []
        for step in range(1, trace.num_steps + 1):
            kept = torch.nonzero((trace.step == 0) | (trace.step == step))[:, 0]
            given = {"input_ids": ids[kept], "position_ids": kept, "attention_mask": torch.ones_like(kept)}
            logits = model(**{name: value[None] for name, value in given.items()}, use_cache=False).logits[0]
            found.append(_losses(logits, ids[kept], trace.words[kept]))
        return torch.cat(found)

    return read


@torch.no_grad()
def loss_by_steps(read: Read, traces: list[MarkedTrace]) -> dict[str, dict[str, float]]:
    """Mean loss in nats a word: of all, by the number of steps in the trace, and by the step that a word stands in."""
    sums: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ("all", "trace_steps", "in_step")}
    for trace in traces:
        losses = read(trace)
        for loss, step in zip(losses.tolist(), trace.step[trace.words].tolist(), strict=True):
            sums["all"]["all"].append(loss)
            sums["trace_steps"][_bin(trace.num_steps)].append(loss)
            sums["in_step"][_bin(step)].append(loss)
    return {
        name: {key: sum(values) / len(values) for key, values in sorted(groups.items())}
        for name, groups in sums.items()
    }


def _bin(steps: int) -> str:
    return str(steps) if steps < MOST_STEPS else f"{MOST_STEPS}+"
