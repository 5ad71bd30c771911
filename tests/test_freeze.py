"""Freeze in plain loops: held rows keep their bits, everything else trains exactly as if rows had zero gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from routeguard import find_routes, freeze
from routeguard.protect.rows import clear_rows, put_rows, take_rows
from routeguard.routes.collection import Routes
from tests.loops import assert_moved, assert_same, backward, dim_of, routed_values, state, tiny, train

# whole tensors, gated rows, fused rows, latent attention, Conv1D columns, a block shared by several layers
CASES = ["lfm2", "qwen3_next", "phi3", "deepseek_v3", "gpt2", "zamba2"]
OPTIMIZERS = {
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9, weight_decay=0.1),
}
pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def reference_train(model: nn.Module, routes: Routes, make, *, steps: int, accumulate: int) -> None:
    """The definition: the same optimizer on whole tensors, rows' gradients zeroed before clipping, rows copied back.

    A tensor held whole is simply not in the optimizer.
    """
    parameters = dict(model.named_parameters())
    start = routed_values(model, routes)
    whole = [name for name in routes.parameters if routes.rows_of(name) is None]
    for name in whole:
        parameters[name].requires_grad_(False)
    partial = [name for name in routes.parameters if name not in whole]
    optimizer = make(trainable(model))
    for step in range(steps):
        for micro in range(accumulate):
            backward(model, step * accumulate + micro)
        for name in partial:
            clear_rows(parameters[name].grad, routes.rows_of(name), dim_of(routes, name))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name in partial:
                put_rows(parameters[name], routes.rows_of(name), start[name], dim_of(routes, name))
        model.zero_grad()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_freeze_equals_its_definition_bit_for_bit(case: str, optimizer: str) -> None:
    guarded, plain = tiny(case), tiny(case)
    routes = find_routes(guarded)
    before = routed_values(guarded, routes)
    frozen = freeze(guarded, routes)
    made = OPTIMIZERS[optimizer](trainable(guarded))
    frozen.attach(made)
    train(guarded, made, steps=3, accumulate=2)
    assert_same(before, routed_values(guarded, routes))
    reference_train(plain, routes, OPTIMIZERS[optimizer], steps=3, accumulate=2)
    assert_same(state(plain), state(guarded))


@pytest.mark.parametrize("case", CASES)
def test_without_freeze_the_same_rows_move(case: str) -> None:
    model = tiny(case)
    routes = find_routes(model)
    before = routed_values(model, routes)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert_moved(before, routed_values(model, routes))


def test_zero_gradient_alone_is_no_freeze() -> None:
    """Positive control for copying back: weight decay moves rows that have no gradient."""
    model = tiny("qwen3_next")
    routes = find_routes(model)
    before = routed_values(model, routes)
    freeze(model, routes)  # not attached to the optimizer
    train(model, torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.1))
    gated = next(name for name in routes.parameters if routes.rows_of(name) is not None)
    assert not torch.equal(before[gated], routed_values(model, routes)[gated])


def test_held_rows_add_nothing_to_the_gradient_norm() -> None:
    model, plain = tiny("qwen3_next"), tiny("qwen3_next")
    routes = find_routes(model)
    freeze(model, routes)
    backward(model, 0)
    backward(plain, 0)
    norm, full = (torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9) for m in (model, plain))
    held = torch.stack(
        [
            take_rows(p.grad, routes.rows_of(name)).norm()
            for name, p in plain.named_parameters()
            if name in routes.parameters
        ]
    ).norm()
    assert held > 0
    torch.testing.assert_close(norm**2 + held**2, full**2)


def test_free_rows_keep_training_with_their_weight_decay() -> None:
    model = tiny("qwen3_next")
    routes = find_routes(model)
    gated = next(name for name in routes.parameters if routes.rows_of(name) is not None)
    before = dict(model.named_parameters())[gated].detach().clone()
    frozen = freeze(model, routes)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.1)
    frozen.attach(optimizer)
    train(model, optimizer)
    changed = (dict(model.named_parameters())[gated] != before).any(1)
    rows = {row for start, stop in routes.rows_of(gated) for row in range(start, stop)}
    assert {int(i) for i in changed.nonzero()} == set(range(len(before))) - rows


def test_release_and_detach_leave_nothing_behind() -> None:
    model = tiny("qwen3_next")
    routes = find_routes(model)
    frozen = freeze(model, routes)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    frozen.attach(optimizer)
    frozen.attach(optimizer)  # idempotent
    assert len(optimizer._optimizer_step_post_hooks) == 1
    frozen.release()
    assert all(p.requires_grad for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks
    before = routed_values(model, routes)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert_moved(before, routed_values(model, routes))


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_row_mixing_optimizers_are_refused_for_row_ranges(name: str) -> None:
    model = tiny("qwen3_next")
    frozen = freeze(model, find_routes(model))
    optimizer = getattr(torch.optim, name)([p for p in trainable(model) if p.ndim == 2], lr=1e-3)
    with pytest.raises(ValueError, match=f"optimizer {name} is not known to treat rows independently"):
        frozen.attach(optimizer)


def test_row_mixing_optimizers_serve_whole_tensors() -> None:
    model = tiny("lfm2")
    routes = find_routes(model)
    before = routed_values(model, routes)
    frozen = freeze(model, routes)
    optimizer = torch.optim.Adafactor(trainable(model), lr=1e-2)
    frozen.attach(optimizer)
    train(model, optimizer)
    assert_same(before, routed_values(model, routes))


def test_structure_and_names_stay() -> None:
    model = tiny("qwen3_next")
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    freeze(model, find_routes(model))
    assert names == [n for n, _ in model.named_modules()]
    assert keys == list(model.state_dict())
    assert list(copy.deepcopy(model).state_dict()) == keys  # the hooks can be copied too
