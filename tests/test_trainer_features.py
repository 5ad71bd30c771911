"""RouteGuard beside the Trainer's own features: retries, compiling, best models, packing, Liger."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.trainer
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from routeguard import RouteGuard, find_routes
from routeguard.drift.record import read_drift
from tests.loops import HIGH, LOW, assert_moved, assert_same, routed_values, tiny
from tests.trainers import MODES, dataset, drifts, parameters, run, settings, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = ["lfm2", "qwen3_5_text"]  # whole tensors; rows beside a gate's
each_mode = pytest.mark.parametrize("mode", MODES)
each_case = pytest.mark.parametrize("case", CASES)


def check(mode: str, trainer: Trainer, free: Trainer, start: dict[str, Tensor]) -> None:
    """Held rows as the mode promises, against a run without a guard, and the drift that was logged."""
    now, unguarded = routed_values(trainer.model), routed_values(free.model)
    assert_moved(start, unguarded)
    if mode in ("freeze", "restored"):
        assert_same(start, now)
    else:
        assert_moved(start, now)
        assert all((now[n] - start[n]).norm() < 0.8 * (unguarded[n] - start[n]).norm() for n in start)
    assert drifts(trainer) and all((value == 0) == (mode == "freeze") for value in drifts(trainer))


class RunsOutOfMemory(TrainerCallback):
    """Once, after the second step, as a device does that has no room for the batch."""

    def __init__(self) -> None:
        self.failed = False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.slow
@each_case
@each_mode
def test_auto_find_batch_size_tries_again_from_the_first_start(mode: str, case: str, tmp_path: Path) -> None:
    def tried(folder: str, *guards: RouteGuard) -> Trainer:
        return run(tiny(case), tmp_path / folder, *guards, RunsOutOfMemory(), auto_find_batch_size=True)

    trainer, free = tried("guarded", MODES[mode]()), tried("free")
    assert trainer._train_batch_size == 1
    check(mode, trainer, free, routed_values(tiny(case)))
    _, samples = read_drift(tmp_path / "guarded" / "routeguard" / "drift.jsonl")
    assert [sample.step for sample in samples] == [1, 2, 3, 4]
    if mode == "restored":  # the second attempt starts where the first one left the weights, and measures from there
        assert min(samples[0].factors.values()) > 0.6
        assert_same(_beside(parameters(free), free.model), _beside(parameters(trainer), trainer.model))


def _beside(values: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    routed = find_routes(model).parameters
    return {name: value for name, value in values.items() if name not in routed}


@each_case
@each_mode
def test_model_init_and_a_second_train(mode: str, case: str, tmp_path: Path) -> None:
    def twice(folder: str, *guards: RouteGuard) -> Trainer:
        trainer = run(None, tmp_path / folder, *guards, trainer_options={"model_init": lambda: tiny(case)})
        first = drifts(trainer)
        trainer.train()  # makes the model anew, and its optimizer
        assert first == drifts(trainer)
        return trainer

    check(mode, twice("guarded", MODES[mode]()), twice("free"), routed_values(tiny(case)))


@each_case
@each_mode
@pytest.mark.parametrize("way", ["argument", "by_hand"])
@mock.patch.dict(os.environ)  # what a run compiles with stays in the environment
def test_compiled_models(way: str, mode: str, case: str, tmp_path: Path) -> None:
    def compiled(folder: str, guards: list[RouteGuard], plain: bool = False) -> tuple[Trainer, nn.Module]:
        model = tiny(case)
        model.config.use_cache = False  # transformers before 5 makes a cache that cannot be compiled
        if way == "argument":
            options = {} if plain else {"torch_compile": True, "torch_compile_backend": "eager"}
            return run(model, tmp_path / folder, *guards, **options), model
        given = model if plain else torch.compile(model, backend="eager")
        return run(given, tmp_path / folder, *guards, remove_unused_columns=False), model

    trainer, model = compiled("guarded", [MODES[mode]()])
    reference, _ = compiled("plain", [MODES[mode]()], plain=True)
    assert_same(routed_values(reference.model), routed_values(model))
    assert drifts(trainer) == drifts(reference)
    if mode in ("freeze", "restored"):
        assert_same(routed_values(tiny(case)), routed_values(model))
    else:
        assert_moved(routed_values(tiny(case)), routed_values(model))


@each_case
@each_mode
def test_best_model_early_stopping_and_weights_only_checkpoints(mode: str, case: str, tmp_path: Path) -> None:
    """Evaluation calls the first checkpoint the best, so training stops at the next one and loads the first."""

    def stopped(folder: str, *guards: RouteGuard) -> Trainer:
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "greater_is_better": True}
        options |= {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "max_steps": 8}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        callbacks = (*guards, EarlyStoppingCallback(1))
        return run(tiny(case), tmp_path / folder, *callbacks, trainer_options={"eval_dataset": dataset(4)}, **options)

    trainer, free = stopped("guarded", MODES[mode]()), stopped("free")
    assert trainer.state.global_step == 4 and trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    check(mode, trainer, free, routed_values(tiny(case)))
    best = tmp_path / "guarded" / "checkpoint-2"
    assert (best / "routeguard.json").is_file() and not (best / "optimizer.pt").exists()
    saved = load_file(best / "model.safetensors")
    for name, value in parameters(trainer).items():
        if name not in find_routes(trainer.model).parameters:
            assert name not in saved or torch.equal(saved[name], value), name
    _, samples = read_drift(tmp_path / "guarded" / "routeguard" / "drift.jsonl")
    assert [sample.step for sample in samples] == [1, 2, 3, 4]


class Stops(TrainerCallback):
    """Ends training after step 3, after the guard has had its turn in that step."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


@each_mode
@pytest.mark.parametrize("event", ["on_step_end", "on_evaluate"])
def test_the_steps_after_the_last_log_line_are_recorded_too(event: str, mode: str, tmp_path: Path) -> None:
    """Training that stops between two log lines, with another model loaded at the end."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "eval_loss"}
    evaluation = {"eval_dataset": dataset(4)}
    options |= {"max_steps": 8, "logging_steps": 2}
    for name, callbacks in (("stopped", [Stops(event)]), ("whole", [])):
        run(tiny(), tmp_path / name, MODES[mode](), *callbacks, trainer_options=evaluation, **options)
    _, stopped = read_drift(tmp_path / "stopped" / "routeguard" / "drift.jsonl")
    _, whole = read_drift(tmp_path / "whole" / "routeguard" / "drift.jsonl")
    assert [sample.step for sample in stopped] == [1, 2, 3]
    assert [sample.factors for sample in stopped] == [sample.factors for sample in whole[:3]]


@each_mode
def test_a_run_goes_on_from_weights_alone(mode: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    first = run(tiny(), tmp_path, MODES[mode](), **options)
    again = run(tiny(seed=1), tmp_path, MODES[mode](), resume=str(tmp_path / "checkpoint-2"), **options)
    if mode in ("freeze", "restored"):
        assert_same(routed_values(tiny()), routed_values(again.model))
    else:
        assert drifts(again)[-1] > drifts(first)[0]  # measured from the run's start, not from the checkpoint


PACKED = {"packing": {"packing": True, "max_length": 32}, "padding_free": {"padding_free": True, "max_length": None}}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("case", ["gemma3_text", "phi3"])  # whole tensors; rows of a fused tensor
@each_mode
def test_packing_and_padding_free(mode: str, case: str, packed: str, tmp_path: Path) -> None:
    lengths = [4 + at % 9 for at in range(40)]
    rows = [torch.randint(LOW, HIGH, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]

    def trained(folder: str, *guards: RouteGuard) -> Trainer:
        set_seed(3)
        options = {"bf16": False, "gradient_checkpointing": False, **PACKED[packed]}
        trainer = SFTTrainer(
            tiny(case),
            args=SFTConfig(**{**settings(tmp_path / folder), **options}),
            processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            callbacks=list(guards),
        )
        trainer.train()
        return trainer

    trainer = trained("guarded", MODES[mode]())
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0] == 1  # sequences beside each other
    check(mode, trainer, trained("free"), routed_values(tiny(case)))


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed (its kernels need a GPU)")
@each_mode
def test_liger(mode: str, tmp_path: Path) -> None:
    trainer, free = (
        run(tiny("llama"), tmp_path / name, *guards, use_liger_kernel=True)
        for name, guards in (("guarded", [MODES[mode]()]), ("free", []))
    )
    check(mode, trainer, free, routed_values(tiny("llama")))


@pytest.mark.skipif(
    not hasattr(transformers.trainer, "apply_liger_kernel"), reason="this transformers has no one place for Liger"
)
@each_mode
def test_forwards_that_are_replaced_on_the_instances_as_liger_does(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Liger, whose kernels need a GPU: `train()` puts other forwards of the same sums into modules."""
    replaced: list[str] = []

    def apply(model: nn.Module, config: Any) -> None:
        for name, module in model.named_modules():
            if type(module).__name__.endswith("MLP"):
                module.forward = fused.__get__(module)
                replaced.append(name)

    def fused(self: Any, x: Tensor) -> Tensor:
        calls.append(1)
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down

    calls: list[int] = []
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", apply)
    trainer, free = (
        run(tiny("llama"), tmp_path / name, *guards, use_liger_kernel=True)
        for name, guards in (("guarded", [MODES[mode]()]), ("free", []))
    )
    assert replaced and calls
    check(mode, trainer, free, routed_values(tiny("llama")))
