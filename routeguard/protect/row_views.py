"""Let an optimizer treat some rows of a tensor apart, without touching the model.

The parameter stays one tensor in the module. The optimizer gets contiguous views of its rows instead of it; after each
gradient accumulation the views' gradients are set to the same rows of the parameter's gradient. For optimizers that
treat entries alone this equals, bit for bit, a model in which the rows are separate parameters.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from routeguard.protect.rows import free_rows
from routeguard.routes.collection import Rows


class RowViews:
    """Contiguous views of one parameter's rows: those held and those free.

    Args:
        name: the parameter's name, for messages.
        parameter: `[rows, …]`, contiguous, on one device (no DTensor, no ZeRO shard).
        rows: the held ranges along dimension 0.
    """

    def __init__(self, name: str, parameter: nn.Parameter, rows: Rows) -> None:
        if not parameter.is_contiguous() or type(parameter.data) is not Tensor:
            raise ValueError(
                f"{name} is sharded or not contiguous; its rows cannot be treated apart. Use protect=Freeze()"
            )
        self.name = name
        self.parameter = parameter
        self.held = self._views(rows)
        self.free = self._views(free_rows(rows, parameter.shape[0]))
        self._stepped = True
        self._used = False  # the optimizer has made a step with the views
        self._hook: Any = None

    def arm(self) -> None:
        """Start handing the parameter's gradient to the views; idempotent."""
        if self._hook is None:
            self._hook = self.parameter.register_post_accumulate_grad_hook(self._bind)

    def _views(self, rows: Rows) -> list[tuple[tuple[int, int], nn.Parameter]]:
        return [((start, stop), nn.Parameter(self.parameter.data[start:stop])) for start, stop in rows]

    def _bind(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if not self._used:
            self._follow()
        for (start, stop), view in (*self.held, *self.free):
            if self._stepped or view.grad is not None:
                view.grad = parameter.grad[start:stop]
            else:
                raise RuntimeError(
                    f"the gradient of {self.name} was cleared through the optimizer only, so old and new gradients are "
                    "now mixed; call model.zero_grad() instead of optimizer.zero_grad()"
                )
        self._stepped = False

    def _follow(self) -> None:
        """Before the first step the parameter may still get other memory (DDP over CPUs does that): go along."""
        for (start, stop), view in (*self.held, *self.free):
            rows = self.parameter.data[start:stop]
            if view.data_ptr() != rows.data_ptr() and view.device == rows.device and view.dtype == rows.dtype:
                view.data = rows

    def after_step(self) -> None:
        """To be called after each optimizer step: the gradient is used up, and the next accumulation starts afresh."""
        self._stepped = self._used = True
        self.parameter.grad = None
        for (start, _), view in (*self.held, *self.free):
            view.grad = None
            if view.data_ptr() != self.parameter.data[start:].data_ptr():
                raise RuntimeError(
                    f"{self.name} was moved to other memory after the optimizer was made (by .to(), a cast or a "
                    "wrapper), so the optimizer no longer updates the model; make the optimizer after moving the model"
                )

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
