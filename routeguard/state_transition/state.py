"""Linear attention over steps with momentum between them, token by token: what is kept while a text is written."""

from __future__ import annotations

import torch
from torch import Tensor

from routeguard.state_transition.accumulation import exact
from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import ANSWER, STEP, StepLayout, stretches
from routeguard.state_transition.momentum import momentum_weight


class StepState:
    """The state of one layer: three matrices a key head and row, whatever the text's length.

    Attributes:
        current: [rows, key heads, width, value width], S_{t,i}: all that is remembered, the open step included.
        before: S_{t−1}, without the open step.
        average: the running mean of past updates.
        steps: [rows], how many steps are finished.

    Source: arXiv 2602.01198, recurrent form.
    """

    def __init__(self, config: StateTransitionConfig, key: Tensor, value: Tensor) -> None:
        """Empty, for rows, heads, widths, dtype (fp32 at least) and device of `key` and `value` [rows, heads, …]."""
        self.config = config
        inside = torch.float64 if key.dtype == torch.float64 else torch.float32
        shape = (*key.shape[:2], key.shape[-1], value.shape[-1])
        self.current = torch.zeros(shape, dtype=inside, device=key.device)
        self.before, self.average = torch.zeros_like(self.current), torch.zeros_like(self.current)
        self.steps = torch.zeros(key.shape[0], dtype=torch.long, device=key.device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.current, self.before, self.average))

    @exact
    def read(self, query: Tensor, key: Tensor, value: Tensor, kind: Tensor) -> Tensor:
        """What one token of each row reads; then a step's token is taken in.

        Args:
            query: [rows, heads, 1, width]; featured and scaled.
            key, value: [rows, key heads, 1, width or value width].
            kind: [rows], of the token (`layout`).

        Returns: [rows, heads, 1, value width]; 0 in prompts.
        """
        inside = self.current.dtype
        grouped = query.to(inside).unflatten(1, (key.shape[1], -1))
        read = torch.einsum("rkgcd,rkde->rkgce", grouped, self.current).flatten(1, 2)
        update = key.to(inside).transpose(-1, -2) @ value.to(inside)
        self.current = self.current + update * _spread(kind == STEP)
        return (read * _spread((kind == STEP) | (kind == ANSWER))).to(query.dtype)

    @exact
    def take_in(self, key: Tensor, value: Tensor, layout: StepLayout) -> None:
        """Take in a whole text at once, into an empty state: keys and values [rows, key heads, tokens, width]."""
        inside = self.current.dtype
        for row, found in enumerate(stretches(layout)):
            this = torch.arange(key.shape[0], device=key.device) == row
            for stretch in found:
                before = stretch.step - (stretch.kind == STEP)
                if stretch.kind in (STEP, ANSWER) and before > int(self.steps[row]):
                    self.finish(this)
                if stretch.kind == STEP:
                    tokens = slice(stretch.start, stretch.stop)
                    update = key[row, :, tokens].to(inside).transpose(-1, -2) @ value[row, :, tokens].to(inside)
                    self.current = self.current + update * _spread(this)

    def finish(self, rows: Tensor) -> None:
        """Close the open step of those rows: `S_t = S_{t−1} + (1−α)∇_t + α·mean`; the mean takes the step in.

        Args:
            rows: [rows] booleans.
        """
        config = self.config
        steps = self.steps + 1
        weights = [momentum_weight(step, config) for step in steps.tolist()]
        alpha = torch.tensor(weights, dtype=self.current.dtype, device=self.current.device)[:, None, None, None]
        plain = self.current - self.before
        update = (1 - alpha) * plain + alpha * self.average
        taken = update if config.running_mean == "corrected" else plain
        average = self.average + (taken - self.average) / steps[:, None, None, None]
        chosen = _spread(rows)
        self.current = torch.where(chosen, self.before + update, self.current)
        self.before = torch.where(chosen, self.current, self.before)
        self.average = torch.where(chosen, average, self.average)
        self.steps = torch.where(rows, steps, self.steps)

    def select(self, rows: Tensor) -> None:
        """Keep those rows, in that order (beam search, several answers to one prompt)."""
        self.current, self.before = self.current.index_select(0, rows), self.before.index_select(0, rows)
        self.average, self.steps = self.average.index_select(0, rows), self.steps.index_select(0, rows)


def _spread(rows: Tensor) -> Tensor:
    return rows[:, None, None, None]
