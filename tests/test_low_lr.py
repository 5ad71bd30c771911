"""LowLR in plain loops: bit-equal to a hand-made optimizer with two groups, or for row ranges to real parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from routeguard import find_routes, low_lr, param_groups
from routeguard.protect.groups import TAG, split_groups
from routeguard.protect.held import held_parameters
from tests.loops import assert_same, routed_values, state, tiny, train

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")

WHOLE = {
    "adamw_fused": lambda g: torch.optim.AdamW(g, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw_foreach": lambda g: torch.optim.AdamW(g, lr=1e-2, weight_decay=0.1, foreach=True),
    "sgd": lambda g: torch.optim.SGD(g, lr=1e-1, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda g: torch.optim.Adafactor(g, lr=1e-2, weight_decay=0.1),
}
BY_ROW = {
    "adamw_fused": WHOLE["adamw_fused"],
    "adamw_foreach": WHOLE["adamw_foreach"],
    "sgd": WHOLE["sgd"],
    "adam": lambda g: torch.optim.Adam(g, lr=1e-2),
    "nadam": lambda g: torch.optim.NAdam(g, lr=1e-2),
    "radam": lambda g: torch.optim.RAdam(g, lr=1e-2),
    "adamax": lambda g: torch.optim.Adamax(g, lr=1e-2),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", WHOLE)
def test_whole_tensors_equal_two_hand_made_groups(optimizer: str) -> None:
    guarded, plain = tiny(), tiny()
    routes = find_routes(guarded)
    made = WHOLE[optimizer](guarded.parameters())
    groups = low_lr(made, guarded, routes, scale=0.1)
    train(guarded, made, steps=4, accumulate=2, after_step=lambda _: groups.check())
    routing = {id(p) for name, p in plain.named_parameters() if name in routes.parameters}
    by_hand = WHOLE[optimizer]([p for p in plain.parameters() if id(p) not in routing])
    rate = by_hand.param_groups[0]["lr"]
    by_hand.add_param_group({"params": [p for p in plain.parameters() if id(p) in routing], "lr": rate * 0.1})
    train(plain, by_hand, steps=4, accumulate=2)
    assert_same(state(plain), state(guarded))


class Split(nn.Module):
    """The reference for row ranges: the tensor really made of separate parameters."""

    def __init__(self, weight: torch.Tensor, edges: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(part.clone()) for part in weight.tensor_split(edges)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, torch.cat(list(self.parts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", BY_ROW)
def test_row_ranges_equal_separate_parameters(optimizer: str, dtype: torch.dtype) -> None:
    """A gated q_proj learns as if its query rows were parameters of their own."""
    guarded, plain = tiny("qwen3_next", dtype=dtype), tiny("qwen3_next", dtype=dtype)
    routes = find_routes(guarded)
    name = next(n for n in routes.parameters if routes.rows_of(n) is not None)
    rows = routes.rows_of(name)
    made = BY_ROW[optimizer](guarded.parameters())
    groups = low_lr(made, guarded, routes.select(roles=["query"]), scale=0.1)
    train(guarded, made, steps=3, after_step=lambda _: groups.check())

    attention = plain.get_submodule(name.removesuffix(".q_proj.weight"))
    edges = sorted({edge for pair in rows for edge in pair} - {0, attention.q_proj.weight.shape[0]})
    attention.q_proj = Split(attention.q_proj.weight.data, edges)
    starts = [0, *edges]
    held = {id(p) for start, p in zip(starts, attention.q_proj.parts, strict=True) if start in {a for a, _ in rows}}
    by_hand = BY_ROW[optimizer]([p for p in plain.parameters() if id(p) not in held])
    by_hand.add_param_group(
        {"params": [p for p in plain.parameters() if id(p) in held], "lr": by_hand.param_groups[0]["lr"] * 0.1}
    )
    train(plain, by_hand, steps=3, max_norm=None)
    guarded_again = tiny("qwen3_next", dtype=dtype)
    made = BY_ROW[optimizer](guarded_again.parameters())
    low_lr(made, guarded_again, routes.select(roles=["query"]), scale=0.1)
    train(guarded_again, made, steps=3, max_norm=None)  # a norm over split parts sums in another order
    expected = torch.cat(list(attention.q_proj.parts))
    assert torch.equal(expected, dict(guarded_again.named_parameters())[name])
    # The control: at one rate for all rows the result is another.
    single = tiny("qwen3_next", dtype=dtype)
    train(single, BY_ROW[optimizer](single.parameters()), steps=3, max_norm=None)
    assert not torch.equal(expected, dict(single.named_parameters())[name])


def test_routing_moves_less_but_moves() -> None:
    low, full = tiny(), tiny()
    routes = find_routes(low)
    start = routed_values(low, routes)
    made = torch.optim.AdamW(low.parameters(), lr=1e-3)
    low_lr(made, low, routes, scale=0.1)
    train(low, made)
    train(full, torch.optim.AdamW(full.parameters(), lr=1e-3))
    for name in routes.parameters:
        moved, free = ((routed_values(m, routes)[name] - start[name]).norm() for m in (low, full))
        assert 0 < moved < 0.2 * free


def test_split_keeps_the_main_group_first_and_drops_empty_ones() -> None:
    model = tiny()
    routing = [p for n, p in model.named_parameters() if n in find_routes(model).parameters]
    rest = [p for p in model.parameters() if all(p is not q for q in routing)]
    optimizer = torch.optim.AdamW([{"params": routing}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    low_lr(optimizer, model, find_routes(model), scale=0.5)
    assert [(g.get(TAG), len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [
        (None, len(rest), 1e-3),
        ("low_lr", len(routing), 5e-4),
    ]


def test_a_changed_rate_is_noticed() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    groups = low_lr(optimizer, model, find_routes(model), scale=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    with pytest.raises(RuntimeError, match=r"learns at 1\.000e-03, not at 0\.1 x"):
        groups.check()
    groups.reassert()
    groups.check()
    del groups.tagged[0][TAG]
    with pytest.raises(RuntimeError, match="lost its 'low_lr' tag"):
        groups.check()


def test_memory_that_changes_before_the_first_step_is_followed() -> None:
    """DDP over CPUs gives parameters other memory after the optimizer was made."""
    left, right = tiny("qwen3_next"), tiny("qwen3_next")
    for model in (left, right):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        low_lr(optimizer, model, find_routes(model), scale=0.1)
        if model is right:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        train(model, optimizer, steps=2)
    assert_same(state(left), state(right))


def test_memory_that_changes_during_training_is_noticed() -> None:
    model = tiny("qwen3_next")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    low_lr(optimizer, model, find_routes(model), scale=0.1)
    train(model, optimizer, steps=1)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match="moved to other memory"):
        train(model, optimizer, steps=1)


def test_optimizer_zero_grad_works_too() -> None:
    """Clearing through the optimizer instead of the model gives the same result for row views."""
    left, right = tiny("qwen3_next"), tiny("qwen3_next")
    for model, clear in ((left, "model"), (right, "optimizer")):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        low_lr(optimizer, model, find_routes(model), scale=0.1)
        for step in range(3):
            ids = torch.randint(10, 80, (2, 16), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            (model if clear == "model" else optimizer).zero_grad()
    assert_same(state(left), state(right))


def test_clearing_between_accumulations_is_an_error() -> None:
    model = tiny("qwen3_next")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    low_lr(optimizer, model, find_routes(model), scale=0.1)
    ids = torch.randint(10, 80, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"model\.zero_grad"):
        model(input_ids=ids, labels=ids).loss.backward()


class Prodigy(torch.optim.AdamW):
    """Stands in for the learning-rate-free optimizers, which are known by name."""


def test_rate_free_optimizers_are_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="sets its own step size"):
        low_lr(Prodigy(model.parameters(), lr=1.0), model, find_routes(model))


def test_refusals() -> None:
    model = tiny()
    routes = find_routes(model)
    stepped = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, stepped, steps=1)
    with pytest.raises(ValueError, match="already holds state"):
        low_lr(stepped, model, routes)
    with pytest.raises(ValueError, match="not a number between 0 and 1"):
        low_lr(torch.optim.AdamW(model.parameters(), lr=1e-3), model, routes, scale=1.5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in routes.parameters)
    with pytest.raises(ValueError, match="no trainable routing parameter"):
        low_lr(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3), model, routes)
    gated = tiny("qwen3_next")
    with pytest.raises(ValueError, match="exact"):
        low_lr(torch.optim.Adadelta(gated.parameters(), lr=1e-3), gated, find_routes(gated))
    fused = tiny("gpt2")
    with pytest.raises(ValueError, match="columns"):
        low_lr(torch.optim.AdamW(fused.parameters(), lr=1e-3), fused, find_routes(fused))


def test_param_groups_cover_every_parameter_once() -> None:
    model = tiny()
    routes = find_routes(model)
    groups = param_groups(model, lr=1e-3, routing_scale=0.1, weight_decay=0.1)
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    parameters = dict(model.named_parameters())
    for group in groups:
        names = {n for n, p in parameters.items() if any(p is q for q in group["params"])}
        assert (group["lr"] == 1e-4) == (TAG in group) == bool(names & set(routes.parameters))
        assert all(parameters[n].ndim >= 2 for n in names) == (group["weight_decay"] > 0)
    assert TAG not in groups[0]


def test_param_groups_refusals() -> None:
    with pytest.raises(ValueError, match="exactly one of routing_lr and routing_scale"):
        param_groups(tiny(), lr=1e-3)
    with pytest.raises(ValueError, match="must be positive"):
        param_groups(tiny(), lr=1e-3, routing_lr=0.0)
    with pytest.raises(ValueError, match=r"routeguard\.low_lr"):
        param_groups(tiny("qwen3_next"), lr=1e-3, routing_lr=1e-4)


def test_held_views_share_memory_with_the_model() -> None:
    model = tiny("qwen3_next")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    groups = split_groups(optimizer, held_parameters(model, find_routes(model)), tag="low_lr", scale=0.1)
    for member, (held, at) in groups.members.items():
        base = held.parameter if at is None else held.parameter[at[0] : at[1]]
        assert member.data_ptr() == base.data_ptr() and member.shape == base.shape
