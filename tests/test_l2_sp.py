"""L2-SP: the pull of every trained weight, in plain loops and in guarded runs, against a plain reference."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback, get_scheduler

from routeguard import L2SP, Average, QKRestore, RouteGuard, Track, l2_sp
from routeguard.drift.record import read_drift
from routeguard.report.collect import collect_run
from routeguard.report.words import protection
from routeguard.training.planned_rates import planned_rates
from tests.loops import assert_moved, assert_same, state, tiny, train
from tests.trainers import parameters, run
from tests.tuned import values

pytestmark = pytest.mark.filterwarnings("ignore")
RATE, STRENGTH = 1e-2, 20.0
TOTAL = 0.5  # the same in a run of four steps at a linearly falling rate: 20 · (1 + 0.75 + 0.5 + 0.25) · 1e-2
MAKE = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.0, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.0, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
}


class Pull(TrainerCallback):
    """Plain reference: after each step every parameter goes `lr · strength` of the way to its start."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = {p: p.detach().clone() for p in kwargs["model"].parameters()}

    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            for parameter in group["params"]:
                parameter.lerp_(self.start[parameter], group["lr"] * self.strength)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return sum(float((left[name] - right[name]).norm() ** 2) for name in left) ** 0.5


# -- plain loops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("case", ["lfm2", "qwen3_next"])
def test_equals_a_plain_loop(case: str, optimizer: str) -> None:
    pulled, plain, free = tiny(case), tiny(case), tiny(case)
    made = MAKE[optimizer](pulled.parameters())
    l2_sp(made, pulled, total=STRENGTH, rates=1.0)
    train(pulled, made, steps=4, accumulate=2)
    start = {p: p.detach().clone() for p in plain.parameters()}

    @torch.no_grad()
    def pull(_: int) -> None:
        for parameter, value in start.items():
            parameter.lerp_(value, RATE * STRENGTH)

    train(plain, MAKE[optimizer](plain.parameters()), steps=4, accumulate=2, after_step=pull)
    assert_same(state(plain), state(pulled))
    train(free, MAKE[optimizer](free.parameters()), steps=4, accumulate=2)
    begun = values(tiny(case))
    assert 0 < distance(values(pulled), begun) < distance(values(free), begun)


def test_each_group_is_pulled_at_its_own_rate_and_without_weight_decay() -> None:
    model = tiny()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.3}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.0)
    pull = l2_sp(optimizer, model, total=1.0, rates=1.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]
    start = values(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    pull.pull()
    names = [name for name, _ in model.named_parameters()]
    for name, value in values(model).items():
        left = 0.5 if name == names[0] else 0.9
        torch.testing.assert_close(value - start[name], torch.full_like(value, left), rtol=0, atol=1e-5)
    pull.remove()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    before = values(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert_same(before, values(model))  # no pull after `remove`


def test_what_is_frozen_is_left_alone() -> None:
    model = tiny()
    embedding = model.get_input_embeddings().weight.requires_grad_(False)
    kept = embedding.detach().clone()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE)
    pull = l2_sp(optimizer, model, rates=1.0)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    members = f"{len(trained)} tensors, {sum(trained):,} parameters"
    assert str(pull) == f"l2_sp: {members} in AdamW, pulled to their start with strength 0.9"
    train(model, optimizer)
    assert torch.equal(embedding, kept)


def test_what_is_frozen_may_be_in_the_optimizer() -> None:
    moved = []
    for given in (lambda p: True, lambda p: p.requires_grad):
        model = tiny()
        embedding = model.get_input_embeddings().weight.requires_grad_(False)
        kept = embedding.detach().clone()
        optimizer = torch.optim.AdamW(filter(given, model.parameters()), lr=RATE)
        l2_sp(optimizer, model, rates=1.0)
        train(model, optimizer)
        assert torch.equal(embedding, kept)
        moved.append(values(model))
    assert_same(*moved)


@pytest.mark.parametrize("added", [True, False])
def test_what_trains_later_has_no_start_until_the_pull_is_made_again(added: bool) -> None:
    model = tiny()
    embedding = model.get_input_embeddings().weight.requires_grad_(False)
    given = [p for p in model.parameters() if p is not embedding or not added]
    optimizer = torch.optim.AdamW(given, lr=RATE, weight_decay=0.1)
    pull = l2_sp(optimizer, model, rates=1.0)
    train(model, optimizer, steps=1)
    embedding.requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": [embedding]})
    with pytest.raises(ValueError, match=r"come to train 1 parameters .*added to it, or unfrozen.*remove\(\)"):
        train(model, optimizer, steps=1)
    pull.remove()
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}
    model.zero_grad()
    before = embedding.detach().clone()
    l2_sp(optimizer, model, rates=1.0)
    train(model, optimizer, steps=1)
    assert not torch.equal(before, embedding)


def test_what_cannot_be_pulled_is_refused() -> None:
    model = tiny()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"its total is 1\.5 times too large"):
        l2_sp(adamw, model, total=3.0, rates=1.0)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not a positive number"):
            l2_sp(adamw, model, total=wrong, rates=1.0)
        with pytest.raises(ValueError, match="would never pull"):
            l2_sp(adamw, model, rates=wrong)
    with pytest.raises(ValueError, match="parameters that the model does not have"):
        l2_sp(torch.optim.AdamW(tiny().parameters(), lr=RATE), model, rates=1.0)
    narrow = tiny(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="below the resolution of 16 bits"):
        l2_sp(torch.optim.AdamW(narrow.parameters(), lr=RATE), narrow, rates=1.0)
    adapted = get_peft_model(
        tiny(dtype=torch.bfloat16), LoraConfig(target_modules=["q_proj"]), autocast_adapter_dtype=False
    )
    with pytest.raises(ValueError, match=r"lora_A\.default\.weight is bfloat16"):
        l2_sp(torch.optim.AdamW(adapted.parameters(), lr=RATE), adapted, rates=1.0)
    frozen = tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model is trainable"):
        l2_sp(adamw, frozen, rates=1.0)


def test_a_warm_up_does_not_hide_a_pull_that_overshoots() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    with pytest.raises(ValueError, match=r"at a learning rate of 0\.5"):
        l2_sp(optimizer, model, total=3.0, rates=1.0)


def test_a_rate_that_rises_until_the_pull_overshoots_is_an_error_at_that_step() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    l2_sp(optimizer, model, total=5.0, rates=1.0)
    train(model, optimizer, steps=1)
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(ValueError, match=r"at a learning rate of 0\.3 .* total is 1\.5 times too large"):
        train(model, optimizer, steps=1)


def test_the_pull_of_the_run_is_what_was_asked_for() -> None:
    """What moved before the first step, and is pushed no more, goes back by exp(-total)."""
    for num_steps, rate in ((400, 1e-3), (800, 1e-5)):
        model = tiny()
        start = values(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=40, num_training_steps=num_steps)
        pull = l2_sp(optimizer, model, total=0.9, rates=planned_rates(optimizer, scheduler, num_steps))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        for _ in range(num_steps):
            optimizer.step()  # without gradients it moves nothing, and the pull follows it
            scheduler.step()
        assert pull.strength == pytest.approx(0.9 / planned_rates(optimizer, scheduler, num_steps))
        name = next(iter(start))
        left = float((values(model)[name] - start[name]).mean())
        assert left == pytest.approx(math.exp(-0.9), abs=0.01)


def test_planned_rates() -> None:
    optimizer = torch.optim.SGD(tiny().parameters(), lr=2.0)
    assert planned_rates(optimizer, None, 5) == 10.0
    linear = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=6)
    assert planned_rates(optimizer, linear, 6) == pytest.approx(2.0 * (0 + 0.5 + 1 + 0.75 + 0.5 + 0.25))
    for _ in range(3):
        optimizer.step()
        linear.step()
    assert planned_rates(optimizer, linear, 6) == pytest.approx(6.0)  # also in the middle of the run
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau does not say its rates beforehand"):
        planned_rates(optimizer, plateau, 6)


def test_the_fastest_group_sets_the_measure_in_any_order() -> None:
    model = tiny()
    slow, *fast = model.parameters()
    groups = [{"params": [slow], "lr": 0.1}, {"params": fast, "lr": 2.0}]
    for order in (groups, groups[::-1]):
        optimizer = torch.optim.SGD([dict(group) for group in order])
        assert planned_rates(optimizer, None, 5) == 10.0
        linear = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=6)
        assert planned_rates(optimizer, linear, 6) == pytest.approx(6.0)
    shares = [lambda step: 1.0, lambda step: 0.5**step]  # each group has its own schedule
    own = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups), shares)
    assert planned_rates(own.optimizer, own, 1000) == pytest.approx(100.0)
    for parameter in fast:
        parameter.requires_grad_(False)
    assert planned_rates(torch.optim.SGD(groups), None, 5) == 0.5  # what is frozen does not count


# -- guarded runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sft", [False, True])
def test_a_guarded_run_equals_a_plain_callback(tmp_path: Path, sft: bool) -> None:
    start = values(tiny())
    guarded = run(tiny(), tmp_path / "guarded", RouteGuard(L2SP(TOTAL)), sft=sft)
    plain = run(tiny(), tmp_path / "plain", Pull(STRENGTH), sft=sft, weight_decay=0.0)
    assert_same(parameters(plain), parameters(guarded))
    free = run(tiny(), tmp_path / "free", sft=sft, weight_decay=0.0)
    assert distance(parameters(guarded), start) < distance(parameters(free), start)
    assert_moved(start, parameters(guarded))
    kept = load_file(tmp_path / "guarded/routeguard/start.safetensors")
    assert_same(kept, start)
    _, drift = read_drift(tmp_path / "guarded/routeguard/drift.jsonl")
    assert [sample.step for sample in drift] == [1, 2, 3, 4] and all(max(s.factors.values()) > 0 for s in drift)


def test_the_order_of_groups_changes_nothing(tmp_path: Path) -> None:
    moved = []
    for order in (1, -1):
        model = tiny()
        start = values(model)
        embedding = model.get_input_embeddings().weight
        rest = [p for p in model.parameters() if p is not embedding]
        groups = [{"params": [embedding], "lr": 1e-3}, {"params": rest, "lr": 1e-2}][::order]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        options = {"optimizers": (optimizer, None)}
        run(model, tmp_path / str(order), RouteGuard(L2SP(TOTAL)), trainer_options=options, max_grad_norm=0.0)
        moved.append(values(model))
        assert_moved(start, moved[-1])
    assert_same(*moved)


def test_the_summary_and_the_report_say_what_is_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard = RouteGuard("l2_sp")
    run(tiny(), tmp_path, guard)
    assert guard.protect == L2SP(0.9)
    members = [value.numel() for value in values(tiny()).values()]
    said = capsys.readouterr().out
    assert "l2_sp: every trained weight is pulled to its start, by 0.9 in all; no weight decay" in said
    assert guard.summary is not None and "its copy on the device takes" in guard.summary
    assert f"pulled: {len(members)} tensors, {sum(members):,} parameters" in guard.summary
    assert "every trained weight was pulled to its start, by 0.9 in all" in protection(collect_run(tmp_path))


@pytest.mark.parametrize("restore", [None, QKRestore(), Average(0.5)])
def test_a_resumed_run_is_pulled_to_the_first_start(tmp_path: Path, restore: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    whole = run(tiny(), tmp_path / "a", RouteGuard(L2SP(TOTAL), restore), **options)
    run(tiny(), tmp_path / "b", RouteGuard(L2SP(TOTAL)), Stop(), **options)
    state_file = tmp_path / "b/routeguard/start.safetensors"
    checkpoint = str(tmp_path / "b/checkpoint-2")
    guard = RouteGuard(L2SP(TOTAL), restore, insist=True)
    resumed = run(tiny(), tmp_path / "b", guard, resume=checkpoint, **options)
    assert_same(parameters(whole), parameters(resumed))
    state_file.unlink()
    with pytest.raises(ValueError, match=r"start\.safetensors"):
        run(tiny(), tmp_path / "b", RouteGuard(L2SP(TOTAL)), resume=checkpoint, **options)


def test_a_named_start_is_what_it_pulls_to(tmp_path: Path) -> None:
    other = tiny(seed=1)
    start = values(other)
    named = run(tiny(), tmp_path / "named", RouteGuard(L2SP(1.25), reference=copy.deepcopy(other)))
    own = run(tiny(), tmp_path / "own", RouteGuard(L2SP(1.25)))
    assert distance(parameters(named), start) < 0.7 * distance(parameters(own), start)
    lacking = {name: value for name, value in start.items() if "feed_forward" not in name}
    with pytest.raises(ValueError, match=r"lacks \d+ of the \d+ trained weights"):
        run(tiny(), tmp_path / "lacking", RouteGuard(L2SP(1.25), reference=lacking))


def test_what_a_guarded_run_cannot_pull_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="below the resolution"):
        run(tiny(dtype=torch.bfloat16), tmp_path, RouteGuard("l2_sp"))
    with pytest.raises(ValueError, match=r"its total is .* times too large"):
        run(tiny(), tmp_path, RouteGuard(L2SP(2.6)))


def test_a_guarded_run_whose_own_optimizer_holds_what_is_frozen(tmp_path: Path) -> None:
    model = tiny()
    model.get_input_embeddings().weight.requires_grad_(False)
    start, optimizer = values(model), torch.optim.AdamW(model.parameters(), lr=RATE)
    run(model, tmp_path, RouteGuard(L2SP(TOTAL)), trainer_options={"optimizers": (optimizer, None)})
    assert {n for n, value in values(model).items() if torch.equal(value, start[n])} == {"model.embed_tokens.weight"}


def test_weight_decay_comes_back_after_the_run(tmp_path: Path) -> None:
    trainer = run(tiny(), tmp_path, RouteGuard("l2_sp"))
    assert max(group["weight_decay"] for group in trainer.optimizer.param_groups) == 0.1
    tracked = run(tiny(), tmp_path / "tracked", RouteGuard(Track()))
    assert max(group["weight_decay"] for group in tracked.optimizer.param_groups) == 0.1
