"""`StepTokens`: the step tokens' rows, kept beside the base model's embedding and output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SAMPLED = 4096  # rows whose mean new ones start from
_SPREAD = 0.1  # of the rows' own standard deviation, so that new rows differ


class StepTokens(nn.Module):
    """Rows of the step tokens: `inputs` and `outputs`, both [tokens, hidden width]; the base has no part in them.

    They start at the mean of the base model's rows, with a little noise of a fixed seed.

    Args:
        embedding: the base model's input embedding.
        head: its output layer.
        token_ids: ids of the step tokens; inside or beyond the base vocabulary.
        dtype: of the rows.
    """

    token_ids: Tensor

    def __init__(
        self, embedding: nn.Module, head: nn.Module, token_ids: tuple[int, ...], *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        in_rows, out_rows = _weight(embedding), _weight(head)
        self.base_size = out_rows.shape[0]
        beyond = sorted(token for token in token_ids if token >= self.base_size)
        self.size = self.base_size + len(beyond)
        if beyond != list(range(self.base_size, self.size)):
            raise ValueError(
                f"step tokens beyond the base vocabulary of {self.base_size} must follow it without a gap; got {beyond}"
            )
        self.register_buffer("token_ids", torch.tensor(token_ids, device=out_rows.device), persistent=False)
        self.enabled = True
        self.asked = False  # the output layer was asked since the pass began
        self._asked: Tensor | None = None
        few = torch.arange(0, in_rows.shape[0], max(1, in_rows.shape[0] // _SAMPLED), device=in_rows.device)
        with torch.no_grad():
            self.inputs = nn.Parameter(_around(embedding(few), len(token_ids), dtype))
            self.outputs = nn.Parameter(_around(out_rows[few], len(token_ids), dtype))

    def before_embedding(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Let the base embed some other token for each step token."""
        self._asked = None
        if not self.enabled:
            return None
        asked: Tensor = args[0]
        steps = torch.isin(asked, self.token_ids)
        if not bool(steps.any()):
            return None
        self._asked = asked
        return (asked.masked_fill(steps, 0), *args[1:])

    def before_other(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """In further embeddings, let token 0 stand for step tokens that the base does not know."""
        if not self.enabled:
            return None
        beyond = args[0] >= self.base_size
        return (args[0].masked_fill(beyond, 0), *args[1:]) if bool(beyond.any()) else None

    def after_embedding(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Put the step tokens' own rows in their places."""
        asked, self._asked = self._asked, None
        if asked is None:
            if self.enabled and torch.is_grad_enabled() and self.inputs.requires_grad:
                return output + (0 * self.inputs.sum()).to(output.dtype)  # a gradient of 0, not none: DDP waits for it
            return None
        which = asked[..., None] == self.token_ids  # [rows, tokens, step tokens], one at most is true
        own = which.to(self.inputs.dtype) @ self.inputs
        return torch.where(which.any(-1, keepdim=True), own.to(output.dtype), output)

    def after_head(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Add the step tokens' logits to the base model's, whose columns stay as they are."""
        if not self.enabled:
            return None
        self.asked = True
        own = (args[0].to(self.outputs.dtype) @ self.outputs.T).to(output.dtype)
        beyond = self.size - output.shape[-1]
        if beyond > 0:
            output = torch.cat([output, output.new_zeros(*output.shape[:-1], beyond)], -1)
        return output.index_copy(-1, self.token_ids, own)


def _weight(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"{type(module).__name__} has no weight of [tokens, width] for step tokens to stand beside")
    return weight


def _around(rows: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    rows = rows.float()
    noise = torch.randn(number, rows.shape[-1], generator=torch.Generator().manual_seed(0)).to(rows.device)
    return (rows.mean(0) + _SPREAD * rows.std() * noise).to(dtype)
