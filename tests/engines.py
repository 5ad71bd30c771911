"""Guarded runs on several engines, and what their tests compare: two gloo processes against one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from routeguard import L2SP, Average, RouteGuard, Track, find_routes, read_drift
from routeguard.routes.names import without_late_wrappers
from routeguard.sharding.whole import whole_tensor
from tests.loops import tiny
from tests.trainers import MODES, run

GUARDS: dict[str, Callable[[], RouteGuard | None]] = {"unguarded": lambda: None, **MODES}
WHOLE_WEIGHTS_ONLY: dict[str, Callable[[], RouteGuard | None]] = {
    "averaged": lambda: RouteGuard(Track(), Average(0.25)),
    "l2_sp": lambda: RouteGuard(L2SP()),
}
HELD = ("freeze", "restored")  # modes after which the held rows equal their start
RESUMED = ("freeze", "low_lr", "anchor", "restored")
SAVING = {"save_strategy": "steps", "save_steps": 2}

# model, mode, and what differs from the plain settings
Case = tuple[str, str, dict[str, Any]]
CASES: dict[str, dict[str, Case]] = {
    "ddp": {
        **{f"whole tensors, {mode}": ("lfm2", mode, {}) for mode in (*GUARDS, *WHOLE_WEIGHTS_ONLY)},
        **{f"rows, {mode}": ("qwen3_5_text", mode, {}) for mode in GUARDS},
        **{f"checkpointing, {mode}": ("lfm2", mode, {"gradient_checkpointing": True}) for mode in GUARDS},
    },
    "fsdp2": {
        **{f"whole tensors, {mode}": ("lfm2", mode, {}) for mode in GUARDS},
        **{f"rows, {mode}": ("qwen3_5_text", mode, {}) for mode in ("unguarded", *HELD)},
        **{f"fused, {mode}": ("phi3", mode, {}) for mode in ("unguarded", *HELD)},
        **{f"columns, {mode}": ("gpt2", mode, {}) for mode in ("unguarded", *HELD)},
        **{f"bf16 mixed, {mode}": ("lfm2", mode, {"bf16": True}) for mode in GUARDS},
        **{f"checkpointing, {mode}": ("lfm2", mode, {}) for mode in ("unguarded", "freeze", "anchor", "restored")},
    },
    **{
        engine: {
            **{f"whole tensors, {mode}": ("lfm2", mode, {}) for mode in GUARDS},
            **{f"rows, {mode}": ("qwen3_5_text", mode, {}) for mode in ("unguarded", *HELD)},
            **{f"columns, {mode}": ("gpt2", mode, {}) for mode in ("unguarded", *HELD)},
            **{f"bf16, {mode}": ("lfm2", mode, {"bf16": True}) for mode in GUARDS},
        }
        for engine in ("zero1", "zero2", "zero3")
    },
}


def settings(engine: str, name: str) -> dict[str, Any]:
    """What the Trainer is told to run a case on an engine."""
    case = CASES[engine][name][0]
    if engine == "fsdp2":
        layers = sorted({type(layer).__name__ for layer in decoder_layers(tiny(case))})
        config = {
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": layers,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": name.startswith("columns"),  # the others get real weights in every process
            "activation_checkpointing": name.startswith("checkpointing"),  # which renames parameters
        }
        return {"fsdp": True, "fsdp_config": config}
    if engine.startswith("zero"):
        zero = {"stage": int(engine[-1]), "stage3_param_persistence_threshold": 1000}  # some stay whole, some do not
        auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}}
        return {"deepspeed": {**config, **dict.fromkeys(auto, "auto")}, "use_cpu": False}
    return {}


def decoder_layers(model: Any) -> list[Any]:
    return next(list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def train_case(case: Case, folder: Path, *, batch_size: int, resume: str | None = None, **changes: Any) -> Any:
    """Run a case; the batches of one process are those of two, side by side."""
    name, mode, specials = case
    guard = {**GUARDS, **WHOLE_WEIGHTS_ONLY}[mode]()
    callbacks = [] if guard is None else [guard]
    # AdamW divides by the size of the gradient: with its usual epsilon, entries whose gradient is almost zero turn
    # the rounding of another order of summation into a whole step.
    options = {
        "train_sampling_strategy": "sequential",
        "adam_epsilon": 1e-3,
        "per_device_train_batch_size": batch_size,
        **specials,
        **changes,
    }
    if options.get("gradient_checkpointing"):
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    unset_hf_deepspeed_config()  # an earlier run's would have ZeRO-3 split the model while it is made
    model = tiny(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # each process draws its own
            module.p = 0.0
    return run(model, folder, *callbacks, resume=resume, **options)


def state(trainer: Any) -> dict[str, Any]:
    """Whole parameters and the log; every process must call it."""
    return {
        "parameters": {
            without_late_wrappers(name): whole_tensor(value).clone() for name, value in trainer.model.named_parameters()
        },
        "log": trainer.state.log_history,
    }


def launch(engine: str, folder: Path) -> None:
    """Run every case of an engine in one pair of processes: importing alone takes seconds."""
    done = distributed("tests.engine_worker", engine, str(folder), deepspeed=engine.startswith("zero"))
    assert done.returncode == 0, done.stderr[-6000:]


def distributed(module: str, *arguments: str, deepspeed: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a module of the tests as two processes over gloo."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if deepspeed:
        tools = str(Path(sys.executable).parent)  # ninja, with which DeepSpeed compiles what moves tensors over CPUs
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
        environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    else:
        environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", module]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=environment)


def loaded(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    return found


def held_masks(case: str) -> dict[str, torch.Tensor]:
    """Which entries of each routed parameter are held."""
    model = tiny(case)
    parameters = dict(model.named_parameters())
    masks: dict[str, torch.Tensor] = {}
    for route in find_routes(model):
        mask = masks.setdefault(route.parameter, torch.zeros(parameters[route.parameter].shape, dtype=torch.bool))
        for start, stop in route.rows or ((0, route.shape[route.dim]),):
            mask[(slice(None),) * route.dim + (slice(start, stop),)] = True
    return masks


def assert_as_one_process(case: Case, two: dict[str, Any], one: dict[str, Any], *, rtol: float, atol: float) -> None:
    """Moving parameters agree with a single process, held rows equal their start bit for bit, and much has moved."""
    name, mode, _ = case
    start = dict(tiny(name).named_parameters())
    moved = 0
    for parameter, value in one["parameters"].items():
        torch.testing.assert_close(two["parameters"][parameter], value, rtol=rtol, atol=atol)
        moved += not torch.equal(value, start[parameter])
    assert moved > len(start) / 2
    for parameter, mask in held_masks(name).items():
        held = torch.equal(two["parameters"][parameter][mask], start[parameter][mask])
        assert held is (mode in HELD), parameter
        if not mask.all():
            assert not torch.equal(two["parameters"][parameter][~mask], start[parameter][~mask])


def assert_drift_as_one_process(two: Path, one: Path, *, rel: float) -> None:
    """The drift that two processes recorded, once a step, is that of one."""
    _, expected = read_drift(one / "routeguard" / "drift.jsonl")
    _, found = read_drift(two / "routeguard" / "drift.jsonl")
    assert [sample.step for sample in found] == [sample.step for sample in expected] == [1, 2, 3, 4]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.factors.keys() == theirs.factors.keys()
        assert list(mine.factors.values()) == pytest.approx(list(theirs.factors.values()), rel=rel)
        assert max(mine.factors.values()) > 0


def assert_resumed_bit_for_bit(folder: Path, mode: str) -> None:
    straight, resumed = loaded(folder, f"straight {mode}"), loaded(folder, f"resumed {mode}")
    different = [
        name
        for name in straight["parameters"]
        if not torch.equal(straight["parameters"][name], resumed["parameters"][name])
    ]
    assert not different, different
    plain = loaded(folder, f"whole tensors, {mode}")
    assert all(torch.equal(straight["parameters"][n], plain["parameters"][n]) for n in plain["parameters"])


def assert_modes_differ(folder: Path) -> None:
    """The control: the cases are not all the same run."""
    (name,) = list(held_masks("lfm2"))[:1]
    values = [loaded(folder, f"whole tensors, {mode}")["parameters"][name] for mode in GUARDS]
    kept = [torch.equal(value, dict(tiny("lfm2").named_parameters())[name]) for value in values]
    assert kept == [False, True, False, False, True]
    assert not torch.equal(values[0], values[2]) and not torch.equal(values[2], values[3])
