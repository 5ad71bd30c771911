"""Plain loops with a gradient scaler: scaling changes nothing, and a skipped step moves nothing, not even by a pull."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from routeguard import anchor, find_routes, freeze, low_lr
from tests.loops import assert_moved, assert_same, backward, routed_values, state, tiny

MODES = ("freeze", "low_lr", "anchor")
CASES = ("lfm2", "qwen3_next")  # whole tensors, and rows of gated ones


def optimizer_of(mode: str, model: nn.Module) -> torch.optim.Optimizer:
    routes = find_routes(model)
    frozen = freeze(model, routes) if mode == "freeze" else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    if frozen is not None:
        frozen.attach(optimizer)
    elif mode == "low_lr":
        low_lr(optimizer, model, routes, scale=0.1)
    else:
        anchor(optimizer, model, routes, strength=30.0)
    return optimizer


def trained(
    mode: str,
    case: str,
    *,
    scaled: bool,
    overflow: int = -1,
    after_step: Callable[[int, nn.Module], None] | None = None,
) -> nn.Module:
    """Three steps; at step `overflow` a gradient is infinite, as fp16 makes them."""
    model = tiny(case)
    optimizer = optimizer_of(mode, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) if scaled else None
    for step in range(3):
        if scaler is None:
            backward(model, step)
        else:
            backward(model, step)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= scaler.get_scale()  # what backward of the scaled loss leaves, exactly
            scaler.scale(torch.zeros(()))  # lets it begin
            if step == overflow:
                next(p for p in model.parameters() if p.grad is not None).grad[0] = float("inf")
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if after_step is not None:
            after_step(step, model)
        model.zero_grad()
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_a_scaler_changes_nothing(mode: str, case: str) -> None:
    assert_same(state(trained(mode, case, scaled=True)), state(trained(mode, case, scaled=False)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_step_moves_nothing(mode: str, case: str) -> None:
    seen: list[dict[str, Tensor]] = []
    held: list[dict[str, Tensor]] = []

    def look(step: int, model: nn.Module) -> None:
        seen.append(state(model))
        held.append(routed_values(model))

    start = routed_values(tiny(case))
    trained(mode, case, scaled=True, overflow=1, after_step=look)
    assert_same(seen[0], seen[1])  # skipped
    assert any(not torch.equal(seen[1][name], seen[2][name]) for name in seen[1])  # and went on
    if mode == "freeze":
        assert_same(held[2], start)
    else:
        assert_moved(start, held[2])
