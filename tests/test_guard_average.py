"""A guarded run that averages every weight with its start at the end, and the recipes that ask for it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback

from routeguard import L2SP, Average, Freeze, QKRestore, RouteGuard, Track
from routeguard.protect.recipes import RECIPES
from routeguard.report.collect import collect_run
from routeguard.report.page import render_page
from routeguard.report.words import restoration
from tests.loops import tiny
from tests.trainers import parameters, run
from tests.tuned import assert_same, values

pytestmark = pytest.mark.filterwarnings("ignore")


def expected_after(tmp_path: Path, alpha: float) -> dict[str, torch.Tensor]:
    """Plain reference: the same run without a guard, averaged by hand."""
    model = tiny()
    start = values(model)
    trained = parameters(run(model, tmp_path / "plain"))
    return {name: (1 - alpha) * value + alpha * start[name] for name, value in trained.items()}


def test_every_weight_is_averaged_with_the_weights_of_the_first_step(tmp_path: Path) -> None:
    start, guard = values(tiny()), RouteGuard("track", Average(0.25))
    trainer = run(tiny(), tmp_path / "guarded", guard)
    expected = expected_after(tmp_path, 0.25)
    for name, value in parameters(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    kept = load_file(tmp_path / "guarded/routeguard/start.safetensors")
    assert kept.keys() == start.keys() and all(torch.equal(kept[name], start[name]) for name in start)
    report = json.loads((tmp_path / "guarded/routeguard/restore.json").read_text())
    assert report["alpha"] == 0.25 and report["num_tensors"] == len(start) and report["drift_before"] > 0
    assert report["notes"] == []  # not that a bare file carries no config: it is the model's own
    logged = [entry["routeguard/drift_before_restore"] for entry in trainer.state.log_history[-3:] if
              "routeguard/drift_before_restore" in entry]  # fmt: skip
    assert logged == [pytest.approx(report["drift_before"])]
    assert guard.summary is not None and "every weight goes 0.25 of the way back" in guard.summary


def test_a_named_start_is_used_instead_of_a_file(tmp_path: Path) -> None:
    other = tiny()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    guard = RouteGuard(Track(), Average(1.0), reference=copy.deepcopy(other))
    trainer = run(tiny(), tmp_path, guard)
    for name, value in values(other).items():
        assert torch.equal(parameters(trainer)[name], value), name
    assert not (tmp_path / "routeguard/start.safetensors").exists()


def test_a_named_start_without_a_config_is_said_to_be_not_compared(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard(Track(), Average(0.5), reference=values(tiny())))
    (note,) = json.loads((tmp_path / "routeguard/restore.json").read_text())["notes"]
    assert "the reference carries no config" in note


def test_frozen_queries_and_keys_keep_their_bits_beside_the_average(tmp_path: Path) -> None:
    start = values(tiny())
    guard = RouteGuard("freeze", Average(0.3))
    after = parameters(run(tiny(), tmp_path, guard))
    held = {route.parameter for route in guard.routes or ()}
    assert held and all(torch.equal(after[name], start[name]) for name in held)
    free = parameters(run(tiny(), tmp_path / "free", RouteGuard()))
    for name in after.keys() - held:
        torch.testing.assert_close(after[name], 0.7 * free[name] + 0.3 * start[name], rtol=1e-6, atol=1e-7)


def test_a_resumed_run_averages_with_the_first_start(tmp_path: Path) -> None:
    start = values(tiny())
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = run(tiny(), tmp_path / "a", RouteGuard("track", Average(0.5)), **options)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    run(tiny(), tmp_path / "b", RouteGuard("track", Average(0.5)), Stop(), **options)
    resumed = tiny()
    checkpoint = str(tmp_path / "b/checkpoint-2")
    trainer = run(resumed, tmp_path / "b", RouteGuard("track", Average(0.5)), resume=checkpoint, **options)
    kept = load_file(tmp_path / "b/routeguard/start.safetensors")
    assert all(torch.equal(kept[name], start[name]) for name in start)
    for name, value in parameters(whole).items():
        assert torch.equal(parameters(trainer)[name], value), name
    (tmp_path / "b/routeguard/start.safetensors").unlink()
    with pytest.raises(ValueError, match=r"start\.safetensors"):
        run(tiny(), tmp_path / "b", RouteGuard("track", Average(0.5)), resume=checkpoint, **options)


def test_a_second_train_keeps_the_first_start(tmp_path: Path) -> None:
    model = tiny()
    guard = RouteGuard("track", Average(1.0))
    start = values(model)
    trainer = run(model, tmp_path, guard)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1.0)
    trainer.train()
    for name, value in start.items():
        assert torch.equal(parameters(trainer)[name], value), name


def fresh_adapter() -> torch.nn.Module:
    torch.manual_seed(0)
    return get_peft_model(tiny(), LoraConfig(r=4, target_modules="all-linear", modules_to_save=["embedding_norm"]))


@pytest.mark.parametrize("protect", ["track", "l2_sp"])
def test_an_adapter_goes_back_as_the_merged_model_would(tmp_path: Path, protect: str) -> None:
    start = values(tiny())
    guarded = run(fresh_adapter(), tmp_path / "a", RouteGuard(protect, Average(0.25))).model.merge_and_unload()
    free = run(fresh_adapter(), tmp_path / "b", RouteGuard(protect)).model.merge_and_unload()
    for name, value in values(free).items():
        torch.testing.assert_close(values(guarded)[name], 0.75 * value + 0.25 * start[name], rtol=1e-5, atol=1e-6)
    kept = load_file(tmp_path / "a/routeguard/start.safetensors")
    assert kept and all("lora_" in name or name == "model.embedding_norm.weight" for name in kept)
    report = json.loads((tmp_path / "a/routeguard/restore.json").read_text())
    assert report["alpha"] == 0.25 and report["num_tensors"] == sum("lora_B" in name for name in kept) + 1


def test_max_recall_on_adapters_is_resumed(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = run(fresh_adapter(), tmp_path / "a", RouteGuard(recipe="max_recall"), **options)
    run(fresh_adapter(), tmp_path / "b", RouteGuard(recipe="max_recall"), **options)
    checkpoint = str(tmp_path / "b/checkpoint-2")
    again = run(fresh_adapter(), tmp_path / "b", RouteGuard(recipe="max_recall"), resume=checkpoint, **options)
    for name, value in parameters(whole).items():
        assert torch.equal(parameters(again)[name], value), name


def test_adapters_that_an_average_cannot_take_back_are_refused_before_the_first_step(tmp_path: Path) -> None:
    dora = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj", "k_proj"], use_dora=True))
    with pytest.raises(ValueError, match="DoRA adapter"):
        run(dora, tmp_path, RouteGuard("track", Average()))
    moved = fresh_adapter()
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    with pytest.raises(ValueError, match="is not at zero there"):
        run(moved, tmp_path, RouteGuard("track", Average(), reference="start"))
    assert not (tmp_path / "routeguard").exists()


def test_an_average_that_is_written_over_is_said(tmp_path: Path) -> None:
    class Over(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1)

    with pytest.warns(UserWarning, match="wrote over the averaged weights"):
        run(tiny(), tmp_path, RouteGuard("track", Average()), Over())


def test_the_report_says_that_weights_were_averaged(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard("track", Average()))
    found = collect_run(tmp_path)
    assert "every weight moved 0.1 of the way back to its start: " in restoration(found)
    assert not [warning for warning in found.warnings if "restore" in warning]
    assert "every weight moved 0.1" in render_page(found)


def test_recipes_are_the_settings_they_stand_for() -> None:
    meant = {  # as in docs/evidence
        "balanced": (L2SP(0.9), None),
        "max_recall": (L2SP(0.9), Average(0.1)),
        "max_reasoning": (Track(), None),
    }
    assert RECIPES.keys() == meant.keys()
    for name in RECIPES:
        guard = RouteGuard(recipe=name)
        assert (guard.protect, guard.restore) == meant[name]
    assert RouteGuard().protect == Freeze() and RouteGuard().restore is None
    with pytest.raises(ValueError, match="closest 'balanced'"):
        RouteGuard(recipe="ballanced")  # type: ignore[arg-type]
    for arguments in ({"protect": "track"}, {"restore": QKRestore()}):
        with pytest.raises(ValueError, match="chooses protect and restore itself"):
            RouteGuard(recipe="balanced", **arguments)  # type: ignore[arg-type]


def test_a_start_that_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    part = {name: value for name, value in values(tiny()).items() if "self_attn" in name}
    same = tiny()
    for model, reference, message in (
        (tiny(), part, r"tensors are not in a state dict"),
        (same, same, "shares its memory with the model"),
    ):
        before = values(model)
        with pytest.raises(ValueError, match=message):
            run(model, tmp_path, RouteGuard("track", Average(), reference=reference))
        assert_same(model, before)


@pytest.mark.parametrize("restore", [QKRestore(), Average(0.5)])
def test_what_was_insisted_on_at_the_start_is_not_refused_at_the_end(tmp_path: Path, restore: object) -> None:
    start = tiny()
    start.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ValueError, match="differ in what gives"):
        run(tiny(), tmp_path / "a", RouteGuard("track", restore, reference=start))
    run(tiny(), tmp_path / "b", RouteGuard("track", restore, reference=start, insist=True))
    assert (tmp_path / "b/routeguard/restore.json").is_file()
