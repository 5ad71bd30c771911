"""Plain loops whose optimizer accelerate has prepared: the same result, bit for bit, as with the optimizer itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from routeguard import anchor, find_routes, freeze, l2_sp, low_lr, param_groups
from tests.loops import assert_moved, assert_same, backward, routed_values, state, tiny
from tests.tuned import values

RATE = 1e-2
MODES: dict[str, Callable[[Any, nn.Module], object]] = {
    "l2_sp": lambda optimizer, model: l2_sp(optimizer, model, rates=0.03),
    "low_lr": lambda optimizer, model: low_lr(optimizer, model, find_routes(model)),
    "anchor": lambda optimizer, model: anchor(optimizer, model, find_routes(model), strength=30.0),
    "freeze": lambda optimizer, model: freeze(model, find_routes(model)).attach(optimizer),
}
CASES = ("lfm2", "qwen3_next")  # whole tensors, and rows of gated ones


def trained(mode: str, case: str, *, prepared: bool, steps: int = 3) -> nn.Module:
    accelerator, model = Accelerator(cpu=True), tiny(case)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    if prepared:
        model, optimizer = accelerator.prepare(model, optimizer)
        assert type(optimizer) is AcceleratedOptimizer
    MODES[mode](optimizer, model)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_a_prepared_optimizer_is_protected_as_it_is_without_accelerate(mode: str, case: str) -> None:
    prepared = trained(mode, case, prepared=True)
    assert_same(state(trained(mode, case, prepared=False)), state(prepared))
    start, routed = tiny(case), routed_values(prepared)
    if mode == "freeze":
        assert_same(routed_values(start), routed)
    else:
        assert_moved(routed_values(start), routed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_its_scaler_skips_moves_nothing(mode: str, case: str) -> None:
    Accelerator(cpu=True)
    model = tiny(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    inner = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, foreach=True)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    MODES[mode](optimizer, model)
    seen: list[dict[str, Tensor]] = [values(model)]
    for step in range(3):
        backward(model, step)
        scaler.scale(torch.zeros(()))  # lets it begin
        if step == 1:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = float("inf")
        optimizer.step()
        assert optimizer.step_was_skipped == (step == 1)
        seen.append(values(model))
        model.zero_grad()
    assert_same(seen[1], seen[2])
    for before, after in ((seen[0], seen[1]), (seen[2], seen[3])):
        assert any(not torch.equal(before[name], after[name]) for name in before)


def test_groups_made_beforehand_are_prepared_as_they_are() -> None:
    accelerator, model = Accelerator(cpu=True), tiny()
    groups = param_groups(model, lr=RATE, routing_scale=0.1)
    optimizer = accelerator.prepare(torch.optim.AdamW(groups))
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups]
    assert RATE * 0.1 in [group["lr"] for group in optimizer.param_groups if group.get("routeguard") == "low_lr"]


def test_the_pull_ends_with_remove_and_decay_comes_back() -> None:
    accelerator, model = Accelerator(cpu=True), tiny()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1))
    pull = l2_sp(optimizer, model, rates=1.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0] and "in AdamW" in str(pull)
    pull.remove()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
