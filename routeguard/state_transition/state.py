"""Linear attention over steps with momentum between them: what is kept while a text is written."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.state_transition.accumulation import exact
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import ANSWER, STEP
from routeguard.state_transition.linear_attention import ChunkPlan, carried_on, chunked_attention
from routeguard.state_transition.momentum import momentum_weight


class StepState:
    """The state of one layer: three matrices a key head and row, whatever the text's length.

    Attributes:
        before: [rows, key heads, width, value width], S_{t−1}, without the open step.
        average: the running mean of past updates.
        open: the open step's own `Σ kᵀv`.
        steps: [rows], how many steps are finished.

    Source: arXiv 2602.01198, recurrent form.
    """

    def __init__(self, config: StateTransitionConfig, key: Tensor, value: Tensor) -> None:
        """Empty, for rows, heads, widths, dtype (fp32 at least) and device of `key` and `value` [rows, heads, …]."""
        self.config = config
        inside = torch.float64 if key.dtype == torch.float64 else torch.float32
        shape = (*key.shape[:2], key.shape[-1], value.shape[-1])
        self.before = torch.zeros(shape, dtype=inside, device=key.device)
        self.average, self.open = torch.zeros_like(self.before), torch.zeros_like(self.before)
        self.steps = torch.zeros(key.shape[0], dtype=torch.long, device=key.device)

    @property
    def current(self) -> Tensor:
        """S_{t,i}: all that is remembered, the open step included."""
        return self.before + self.open

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.before, self.average, self.open))

    @exact
    def read(self, query: Tensor, key: Tensor, value: Tensor, kind: Tensor) -> Tensor:
        """What one token of each row reads; then a step's token is taken in.

        Args:
            query: [rows, heads, 1, width]; featured and scaled.
            key, value: [rows, key heads, 1, width or value width].
            kind: [rows], of the token (`layout`).

        Returns: [rows, heads, 1, value width]; 0 in prompts.
        """
        inside = self.open.dtype
        grouped = query.to(inside).unflatten(1, (key.shape[1], -1))
        read = torch.einsum("rkgcd,rkde->rkgce", grouped, self.current).flatten(1, 2)
        update = key.to(inside).transpose(-1, -2) @ value.to(inside)
        self.open = self.open + update * _spread(kind == STEP)
        return (read * _spread((kind == STEP) | (kind == ANSWER))).to(query.dtype)

    @exact
    def read_piece(self, query: Tensor, key: Tensor, value: Tensor, plan: ChunkPlan, finished: Tensor) -> Tensor:
        """What several tokens of each row read; then they are taken in, with the steps that end among them.

        Args:
            query, key, value: as in `chunked_attention`.
            plan: of the tokens, made with `steps`.
            finished: [rows], how many steps are finished after them.
        """
        carried = torch.stack([self.before, self.average, self.open], 2)
        read = chunked_attention(query, key, value, plan, carried)
        self.before, self.average, self.open = carried_on(key, value, plan, carried).unbind(2)
        self.steps = finished
        return read

    def finish(self, rows: Tensor) -> None:
        """Close the open step of those rows: `S_t = S_{t−1} + (1−α)∇_t + α·mean`; the mean takes the step in.

        Args:
            rows: [rows] booleans.
        """
        config = self.config
        steps = self.steps + 1
        weights = [momentum_weight(step, config) for step in steps.tolist()]
        alpha = torch.tensor(weights, dtype=self.open.dtype, device=self.open.device)[:, None, None, None]
        update = (1 - alpha) * self.open + alpha * self.average
        taken = update if config.running_mean == "corrected" else self.open
        average = self.average + (taken - self.average) / steps[:, None, None, None]
        chosen = _spread(rows)
        self.before = torch.where(chosen, self.before + update, self.before)
        self.average = torch.where(chosen, average, self.average)
        self.open = torch.where(chosen, 0.0, self.open)
        self.steps = torch.where(rows, steps, self.steps)

    def select(self, rows: Tensor) -> None:
        """Keep those rows, in that order (beam search, several answers to one prompt)."""
        for name in ("before", "average", "open", "steps"):
            setattr(self, name, getattr(self, name).index_select(0, rows))


def _spread(rows: Tensor) -> Tensor:
    return rows[:, None, None, None]
