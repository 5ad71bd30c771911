"""`StepLimit`: close a step that runs too long while text is generated."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from routeguard.state_transition.config import StateTransitionConfig


class StepLimit(LogitsProcessor):  # type: ignore[misc]
    """Force the end token once a step is as long as it may be: `generate(logits_processor=[StepLimit(config, 512)])`.

    Memory then stays bounded by the prompt and `max_step_tokens`. Without it an open step grows as any text does, and a
    start token inside it opens the next one.

    Args:
        config: of the conversion.
        max_step_tokens: start and end token included, 3 or more.
    """

    def __init__(self, config: StateTransitionConfig, max_step_tokens: int) -> None:
        if not isinstance(max_step_tokens, int) or max_step_tokens < 3:
            raise ValueError(f"max_step_tokens must be at least 3 (start, a token, end); got {max_step_tokens!r}")
        self.config = config
        self.max_step_tokens = max_step_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        recent = input_ids[:, -(self.max_step_tokens - 1) :]
        if recent.shape[1] < self.max_step_tokens - 1:
            return scores
        starts = torch.isin(recent, torch.tensor(self.config.start_token_ids, device=recent.device))
        ends = recent == self.config.end_token_id
        # As long as it may be: it began at the first of them, and nothing began or ended since.
        full = starts[:, 0] & ~(starts | ends)[:, 1:].any(1)
        late = ~(starts | ends).any(1) & self._open(input_ids)
        forced = torch.full_like(scores, torch.finfo(scores.dtype).min)
        forced[:, self.config.end_token_id] = 0
        return torch.where((full | late)[:, None], forced, scores)

    def _open(self, input_ids: Tensor) -> Tensor:
        """Rows that are inside a step: one that the prompt left open may be too long already."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        starts = torch.isin(input_ids, torch.tensor(self.config.start_token_ids, device=input_ids.device))
        ends = input_ids == self.config.end_token_id
        last_start = torch.where(starts, places, -1).amax(1)
        return last_start > torch.where(ends, places, -1).amax(1)
