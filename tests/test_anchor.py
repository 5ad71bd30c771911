"""Anchor in plain loops: bit-equal to a plain reference loop, and meaning what its docstring says."""

from __future__ import annotations

import math

import pytest
import torch

from routeguard import Anchor, anchor, find_routes
from routeguard.protect.anchor import AnchorPull
from routeguard.protect.groups import split_groups
from routeguard.protect.held import Held
from routeguard.protect.rows import put_rows, take_rows
from tests.loops import assert_same, routed_values, state, tiny, train

MAKE = {
    "adamw_fused": lambda g: torch.optim.AdamW(g, lr=1e-2, weight_decay=0.0, fused=True),
    "adamw_foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, weight_decay=0.0, foreach=True),
    "sgd": lambda g: torch.optim.SGD(g, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("case", ["lfm2", "qwen3_next"])
def test_equals_a_plain_loop(case: str, optimizer: str, dtype: torch.dtype) -> None:
    guarded, plain = tiny(case, dtype=dtype), tiny(case, dtype=dtype)
    routes = find_routes(guarded)
    made = MAKE[optimizer](guarded.parameters())
    anchor(made, guarded, routes, strength=20.0)
    train(guarded, made, steps=4, accumulate=2)

    parameters = dict(plain.named_parameters())
    start = routed_values(plain, routes)

    @torch.no_grad()
    def pull(_: int) -> None:
        for name in routes.parameters:
            rows = routes.rows_of(name)
            now = take_rows(parameters[name], rows)
            put_rows(parameters[name], rows, torch.lerp(now, start[name], 1e-2 * 20.0))

    train(plain, MAKE[optimizer](plain.parameters()), steps=4, accumulate=2, after_step=pull)
    assert_same(state(plain), state(guarded))
    free = tiny(case, dtype=dtype)
    train(free, MAKE[optimizer](free.parameters()), steps=4, accumulate=2)
    for name in routes.parameters:  # the control: without the pull they are further away
        near, far = ((routed_values(m, routes)[name].float() - start[name].float()).norm() for m in (guarded, free))
        assert 0 < near < far


def test_weight_decay_does_not_pull_anchored_rows_to_zero() -> None:
    model = tiny("qwen3_next")
    routes = find_routes(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    pull = anchor(optimizer, model, routes, strength=1.0)
    assert [group["weight_decay"] for group in pull.groups.tagged] == [0.0]
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_half_life_is_what_it_says() -> None:
    mode, rate = Anchor(strength=5.0), 1e-2
    displacement = (1 - rate * mode.strength) ** mode.half_life_steps(rate)
    assert math.isclose(displacement, 0.5)


def test_under_adamw_a_steadily_pushed_entry_rests_at_one_over_strength() -> None:
    """A constant gradient drives AdamW at full speed; the pull balances it at about 1 / strength."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([parameter, torch.nn.Parameter(torch.zeros(1))], lr=1e-2, weight_decay=0.0)
    held = Held("weight", parameter, None, 0, "base", ())
    groups = split_groups(optimizer, [held], tag="anchor", weight_decay=0.0)
    AnchorPull(groups, {"weight": torch.zeros(4)}, Anchor(20.0))
    for _ in range(400):
        parameter.grad = torch.tensor([1.0, -1.0, 1e-3, 5.0])
        optimizer.step()
    torch.testing.assert_close(parameter.abs().detach(), torch.full((4,), 1 / 20.0), rtol=0.25, atol=0.0)


def test_overshooting_strength_is_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="use a strength of at most 100"):
        anchor(torch.optim.AdamW(model.parameters(), lr=1e-2), model, find_routes(model), strength=101)
    for strength in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="not a positive number"):
            Anchor(strength)


def test_a_rate_that_rises_until_the_pull_overshoots_is_an_error_at_that_step() -> None:
    model = tiny()
    routes = find_routes(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    anchor(optimizer, model, routes, strength=100.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    start, steps = routed_values(model, routes), 0
    with pytest.raises(ValueError, match=r"strength 100 at a learning rate of 0\.052.* at most 19"):
        for _ in range(10):
            train(model, optimizer, steps=1)
            scheduler.step()
            steps += 1
    assert steps == 1  # its first rate is 0.004
    for name, value in routed_values(model, routes).items():
        assert (value - start[name]).norm() < 0.1 * start[name].norm()


def test_the_strength_that_a_refusal_names_is_accepted() -> None:
    for rate in (6e-3, 7e-3, 3e-5, 1e-2):  # some of their inverses are rounded up
        model = tiny()
        anchor(torch.optim.SGD(model.parameters(), lr=rate), model, find_routes(model), strength=float(f"{1 / rate:g}"))


def test_removed_pull_pulls_no_more() -> None:
    model, plain = tiny(), tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    anchor(optimizer, model, find_routes(model), strength=50.0).remove()
    train(model, optimizer)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0))
    assert_same(state(model), state(plain))
