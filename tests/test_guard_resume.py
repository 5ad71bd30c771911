"""Resuming a guarded run: bit-identical to one that was never interrupted, or refused with a reason."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

from routeguard import L2SP, Anchor, Average, Freeze, LowLR, QKRestore, RouteGuard, Track, find_routes
from routeguard.drift.record import read_drift
from routeguard.training.run_state import read_state
from tests.loops import assert_moved, assert_same, routed_values, tiny
from tests.trainers import make, parameters, run

pytestmark = pytest.mark.filterwarnings("ignore")

MODES = {"freeze": Freeze(), "low_lr": LowLR(0.1), "anchor": Anchor(20.0), "l2_sp": L2SP(), "track": Track()}
SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}


def interrupted(model, output: Path, guard: RouteGuard | None, resumed: RouteGuard | None) -> Trainer:
    """Four steps, forgotten; then resumed from the checkpoint at step 2 with a fresh model of other random weights."""
    run(model, output, *([guard] if guard else []), **SAVING)
    fresh = tiny(model.config.model_type, seed=1)
    return run(fresh, output, *([resumed] if resumed else []), resume=str(output / "checkpoint-2"), **SAVING)


def logged_drift(trainer: Trainer) -> list[float]:
    return [r["routeguard/drift_query"] for r in trainer.state.log_history if "routeguard/drift_query" in r]


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])  # whole tensors; gated rows
@pytest.mark.parametrize("mode", MODES)
def test_resume_is_bit_identical(mode: str, case: str, tmp_path: Path) -> None:
    straight = run(tiny(case), tmp_path / "a", RouteGuard(MODES[mode]), **SAVING)
    again = interrupted(tiny(case), tmp_path / "b", RouteGuard(MODES[mode]), RouteGuard(MODES[mode]))
    assert_same(parameters(straight), parameters(again))
    assert [r["loss"] for r in straight.state.log_history if "loss" in r] == [
        r["loss"] for r in again.state.log_history if "loss" in r
    ]
    series = [read_drift(tmp_path / f / "routeguard" / "drift.jsonl")[1] for f in "ab"]
    assert series[0] == series[1] and [s.step for s in series[0]] == [1, 2, 3, 4]


def test_without_the_guard_the_resumed_rows_move(tmp_path: Path) -> None:
    model = tiny()
    before = routed_values(model)
    again = interrupted(model, tmp_path, None, None)
    assert_moved(before, routed_values(again.model))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Anchor(20.0), Anchor(30.0), "protect: .*20.0.* → .*30.0"),
        (Anchor(20.0), Track(), "other settings than it had"),
        (LowLR(0.1), LowLR(0.2), "protect: .*0.1.* → .*0.2"),
        (Track(), Freeze(), "other settings than it had"),
        (Freeze(), LowLR(), "other settings than it had"),
    ],
)
def test_changed_settings_are_refused(first, second, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        interrupted(tiny(), tmp_path, RouteGuard(first), RouteGuard(second))


def test_insisting_goes_on_with_the_new_strength(tmp_path: Path) -> None:
    again = interrupted(tiny(), tmp_path, RouteGuard(LowLR(0.1)), RouteGuard(LowLR(0.2), insist=True))
    rates = [group["lr"] for group in again.optimizer.param_groups if group.get("routeguard")]
    assert rates and read_state(tmp_path / "checkpoint-4").protect["scale"] == 0.2


def test_a_checkpoint_made_without_the_guard_is_refused_unless_its_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made without RouteGuard"):
        interrupted(tiny(), tmp_path / "a", None, RouteGuard("track"))
    base = tmp_path / "base"
    tiny().save_pretrained(base)
    from_start, from_base = (
        logged_drift(interrupted(tiny(), tmp_path / folder, None, RouteGuard("track", reference=reference)))
        for folder, reference in (("b", "start"), ("c", str(base)))
    )
    assert len(from_start) == len(from_base) == 2
    assert from_start[-1] < from_base[-1]  # the base start is two steps further away


def test_a_missing_or_foreign_sidecar_is_refused(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard("track"), **SAVING)
    sidecar = tmp_path / "routeguard" / "reference.safetensors"
    kept = sidecar.read_bytes()
    sidecar.unlink()
    with pytest.raises(ValueError, match="start that the resumed run protects is gone"):
        run(tiny(), tmp_path, RouteGuard("track"), resume=str(tmp_path / "checkpoint-2"), **SAVING)
    sidecar.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(ValueError, match="digest"):
        run(tiny(), tmp_path, RouteGuard("track"), resume=str(tmp_path / "checkpoint-2"), **SAVING)
    run(tiny(seed=1), tmp_path / "other", RouteGuard("track"), **SAVING)
    shutil.copy(tmp_path / "other" / "routeguard" / "reference.safetensors", sidecar)
    with pytest.raises(ValueError, match="is not the start that the resumed run protected"):
        run(tiny(), tmp_path, RouteGuard("track"), resume=str(tmp_path / "checkpoint-2"), **SAVING)


def test_a_frozen_checkpoint_whose_rows_were_changed_is_refused(tmp_path: Path) -> None:
    model = tiny()
    run(model, tmp_path, RouteGuard(), **SAVING)
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    tensors = load_file(file)
    name = next(r.parameter for r in find_routes(model))
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not the start that the run protected"):
        run(tiny(), tmp_path, RouteGuard(), resume=str(tmp_path / "checkpoint-2"), **SAVING)


def test_damaged_state_is_an_error_not_a_fresh_run(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard("track"), **SAVING)
    for text in ("{", "[]", "null", '"text"'):
        (tmp_path / "checkpoint-2" / "routeguard.json").write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            run(tiny(), tmp_path, RouteGuard("track"), resume=str(tmp_path / "checkpoint-2"), **SAVING)


def second_stage(first: Path, output: Path, guard: RouteGuard) -> Trainer:
    return run(AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32), output, guard)


def test_a_second_stage_must_say_which_start_it_protects(tmp_path: Path) -> None:
    first = run(tiny(), tmp_path / "sft", RouteGuard("track"))
    first.save_model()
    with pytest.raises(ValueError, match="Say which start this stage protects"):
        second_stage(tmp_path / "sft", tmp_path / "rl", RouteGuard("track"))
    now = second_stage(tmp_path / "sft", tmp_path / "rl", RouteGuard("track", reference="start"))
    assert read_state(tmp_path / "rl").stage == 2
    kept = str(tmp_path / "sft" / "routeguard")
    original = second_stage(tmp_path / "sft", tmp_path / "rl2", RouteGuard("track", reference=kept))
    assert logged_drift(original)[0] > logged_drift(now)[0]
    guard = RouteGuard("track", reference=str(tmp_path / "sft"))  # which holds a model: its own weights
    folder = second_stage(tmp_path / "sft", tmp_path / "rl3", guard)
    assert logged_drift(folder) == logged_drift(now)
    assert (
        guard.summary is not None and "the start that a guarded run kept; its own weights were taken" in guard.summary
    )


def test_a_second_stage_of_a_frozen_run_is_unambiguous(tmp_path: Path) -> None:
    first = run(tiny(), tmp_path / "sft", RouteGuard())
    first.save_model()
    second_stage(tmp_path / "sft", tmp_path / "rl", RouteGuard())
    states = [read_state(tmp_path / name) for name in ("sft", "rl")]
    assert [s.stage for s in states] == [1, 2]
    assert states[0].reference_digest == states[1].reference_digest


def test_freeze_refuses_a_reference_that_the_weights_have_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="queries and keys differ from the reference"):
        run(tiny(seed=1), tmp_path, RouteGuard(reference=tiny(seed=0)))
    run(tiny(), tmp_path, RouteGuard(reference=tiny()))


def test_an_earlier_run_in_the_same_folder_is_kept(tmp_path: Path) -> None:
    run(tiny(seed=1), tmp_path, RouteGuard("track"))
    first = (tmp_path / "routeguard" / "reference.safetensors").read_bytes()
    lines = (tmp_path / "routeguard" / "drift.jsonl").read_text()
    run(tiny(seed=2), tmp_path, RouteGuard("track"))
    assert (tmp_path / "routeguard" / "reference.1.safetensors").read_bytes() == first
    assert (tmp_path / "routeguard" / "drift.1.jsonl").read_text() == lines


def test_what_another_run_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "routeguard"
    run(tiny(seed=1), tmp_path, RouteGuard(Track(), Average(0.5)))
    left = {
        name: (folder / name).read_bytes() for name in ("reference.safetensors", "start.safetensors", "restore.json")
    }
    run(tiny(seed=2), tmp_path, RouteGuard())  # which keeps none of these
    for name, data in left.items():
        stem, suffix = name.split(".")
        assert not (folder / name).exists() and (folder / f"{stem}.1.{suffix}").read_bytes() == data
    run(tiny(seed=3), tmp_path, RouteGuard(Track(), Average(0.5)))
    run(tiny(seed=3), tmp_path, RouteGuard(Track(), Average(0.5)))  # begun again: the same start, once
    assert sorted(path.name for path in folder.glob("start*")) == ["start.1.safetensors", "start.safetensors"]
    kept = folder / "start.safetensors"
    run(tiny(seed=3), tmp_path, RouteGuard(Track(), QKRestore(), reference=str(kept)))
    assert kept.is_file()
    assert json.loads((tmp_path / "routeguard" / "drift.jsonl").read_text().splitlines()[0])["schema_version"] == 1


def test_resumed_folder_is_read_off_the_running_call_only(tmp_path: Path) -> None:
    from routeguard.training.trainer_access import resumed_folder

    trainer = make(tiny(), tmp_path, RouteGuard())
    resume_from_checkpoint = "not this one"  # a local of a frame that is not the trainer's
    assert resumed_folder(trainer) is None and resume_from_checkpoint


def test_start_still_means_the_start_of_the_run_after_a_resume(tmp_path: Path) -> None:
    guards = [RouteGuard(Anchor(20.0), reference="start") for _ in range(3)]
    straight = run(tiny(), tmp_path / "a", guards[0], **SAVING)
    again = interrupted(tiny(), tmp_path / "b", guards[1], guards[2])
    assert_same(parameters(straight), parameters(again))
    assert logged_drift(straight) == logged_drift(again)


def test_a_named_reference_does_not_switch_the_checks_off(tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    tiny().save_pretrained(base)
    tiny(seed=2).save_pretrained(other)
    run(tiny(), tmp_path / "run", RouteGuard(Anchor(20.0), reference=str(base)), **SAVING)
    resume = {"resume": str(tmp_path / "run" / "checkpoint-2"), **SAVING}
    with pytest.raises(ValueError, match="other settings than it had"):
        run(tiny(), tmp_path / "run", RouteGuard(Anchor(50.0), reference=str(base)), **resume)
    with pytest.raises(ValueError, match="protected another start"):
        run(tiny(), tmp_path / "run", RouteGuard(Anchor(20.0), reference=str(other)), **resume)
    run(tiny(), tmp_path / "run", RouteGuard(Anchor(20.0), reference=str(base)), **resume)


def test_a_model_saved_elsewhere_still_says_what_it_protected(tmp_path: Path) -> None:
    first = run(tiny(), tmp_path / "sft", RouteGuard("track"))
    first.save_model(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="Say which start this stage protects"):
        second_stage(tmp_path / "elsewhere", tmp_path / "rl", RouteGuard("track"))


def test_a_second_train_keeps_the_first_start(tmp_path: Path) -> None:
    trainer = run(tiny(), tmp_path, RouteGuard("track"), **SAVING)
    first = logged_drift(trainer)
    trainer.args.max_steps = 2
    trainer.args.learning_rate = 1e-6
    trainer.train()
    assert logged_drift(trainer)[0] == pytest.approx(first[-1], rel=0.2)  # a new start would log almost nothing


def test_a_weights_only_checkpoint_counts_as_resumed(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard("track"), **SAVING)
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (tmp_path / "checkpoint-2" / name).unlink(missing_ok=True)
    trainer = make(tiny(seed=1), tmp_path, RouteGuard("track"), **SAVING)
    with pytest.raises((FileNotFoundError, ValueError)):
        trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-2" / "nowhere")
    from routeguard.training.start import find_start

    guard = RouteGuard("track")
    guard.attach(make(tiny(), tmp_path / "other"))
    from routeguard.protect.held import held_parameters

    model = tiny(seed=3)
    start = find_start(
        None,
        model,
        held_parameters(model, find_routes(model)),
        guard.run_state(),
        guard.protect,
        output_dir=tmp_path,
        resumed_from=tmp_path / "checkpoint-2",
        resumed=True,
        kept=None,
        insist=False,
    )
    assert start.digest == read_state(tmp_path).reference_digest


def test_what_a_run_held_and_ran_with_is_kept_and_read_back(tmp_path: Path) -> None:
    guard = RouteGuard()
    trainer = run(tiny("qwen3_next"), tmp_path, guard, **SAVING)
    routes = find_routes(trainer.model)
    state = read_state(tmp_path)
    assert state is not None and state == read_state(tmp_path / "checkpoint-4") and state.coverage is not None
    held = {name: (rows, of) for layer in state.coverage.layers for name, rows, of in layer.tensors}
    assert held == {r.parameter: (r.num_rows, r.shape[0]) for r in routes}
    assert state.coverage.num_parameters == routes.num_parameters and state.coverage.share == routes.share
    assert state.versions["torch"] == metadata.version("torch")
    assert state.versions.keys() >= {"python", "routeguard", "transformers", "trl", "peft", "accelerate"}


def test_a_file_of_an_earlier_version_is_read_and_resumed_from(tmp_path: Path) -> None:
    run(tiny(), tmp_path, RouteGuard("track"), **SAVING)
    for path in tmp_path.rglob("routeguard.json"):
        data = json.loads(path.read_text())
        del data["coverage"], data["versions"]
        path.write_text(json.dumps(data))
    state = read_state(tmp_path)
    assert state is not None and state.coverage is None and state.versions == {}
    run(tiny(), tmp_path, RouteGuard("track"), resume=str(tmp_path / "checkpoint-2"), **SAVING)
    assert read_state(tmp_path).coverage is not None
    for broken in ({"layers": [{}]}, {"layers": []}, 3):
        path = tmp_path / "routeguard" / "routeguard.json"
        path.write_text(json.dumps({**data, "coverage": broken}))
        with pytest.raises(ValueError, match="is damaged"):
            read_state(tmp_path / "routeguard")


# -- files of other runs around, and named references ------------------------------------------------------------------


def test_a_resumed_run_finds_its_own_whole_start_beside_another_runs(tmp_path: Path) -> None:
    """The checkpoint of one run goes on in the folder of another, which kept a start of its own."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    straight = run(tiny(seed=1), tmp_path / "mine", RouteGuard(L2SP()), **saving)
    run(tiny(seed=2), tmp_path / "other", RouteGuard(L2SP()))
    checkpoint = str(tmp_path / "mine" / "checkpoint-2")
    resumed = run(tiny(seed=1), tmp_path / "other", RouteGuard(L2SP()), resume=checkpoint)
    assert_same(parameters(straight), parameters(resumed))
    (tmp_path / "mine/routeguard/start.safetensors").unlink()
    run(tiny(seed=2), tmp_path / "other", RouteGuard(L2SP()))
    with pytest.raises(ValueError, match="was kept by another run"):
        run(tiny(seed=1), tmp_path / "other", RouteGuard(L2SP()), resume=checkpoint)


def test_an_unguarded_checkpoint_in_the_folder_of_a_guarded_run_is_seen(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    run(tiny(seed=1), tmp_path, RouteGuard(Track(), QKRestore()))
    run(tiny(seed=2), tmp_path, **saving)
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="was made without RouteGuard"):
        run(tiny(seed=2), tmp_path, RouteGuard(Track(), QKRestore()), resume=checkpoint)


@pytest.mark.parametrize("mode", ["track", "anchor"])
def test_adapters_resume_beside_a_named_base(mode: str, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    saving = {"save_strategy": "steps", "save_steps": 2}

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        return get_peft_model(tiny(), LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"]))

    def guard() -> RouteGuard:
        return RouteGuard(mode, reference=str(tmp_path / "base"))

    straight = run(adapted(), tmp_path / "a", guard(), **saving)
    run(adapted(), tmp_path / "b", guard(), **saving)
    again = run(adapted(), tmp_path / "b", guard(), resume=str(tmp_path / "b/checkpoint-2"), **saving)
    assert_same(parameters(straight), parameters(again))
    drifts = [read_drift(tmp_path / name / "routeguard/drift.jsonl")[1] for name in "ab"]
    assert [s.factors for s in drifts[0]] == [s.factors for s in drifts[1]]
    moved = straight.model
    with pytest.raises(ValueError, match=r"holds no start of .*lora_B.*not at zero"):
        run(moved, tmp_path / "c", guard())
