"""What users do on an engine beside the table of modes: adapters, named starts, averages, evaluations, preferences.

Each extra runs in both processes of an engine's pair (tests/engine_worker.py) and is checked in its test file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import BEMACallback

from routeguard import QKRestore, RouteGuard, Track, find_routes, restore
from routeguard.protect.rows import take_rows
from tests.engines import decoder_layers, held_masks, settings, state
from tests.loops import tiny
from tests.test_trl_trainers import adapted, dpo
from tests.trainers import dataset, run

Found = dict[str, Any]
SHIFT = 1e-2


@dataclass(frozen=True)
class Extra:
    """`run` gets the engine and a folder; `check` what it gave in each of the two processes."""

    run: Callable[[str, Path], Found]
    check: Callable[[Found, Found], None]


def options(engine: str, case: str, *, batch_size: int = 2) -> dict[str, Any]:
    """As `tests.engines.train_case` has them."""
    unset_hf_deepspeed_config()  # for the model that is made next
    found = {"train_sampling_strategy": "sequential", "adam_epsilon": 1e-3, "per_device_train_batch_size": batch_size}
    found |= settings(engine, "whole tensors, freeze") if engine else {}
    if engine == "fsdp2":
        layers = sorted({type(layer).__name__ for layer in decoder_layers(tiny(case))})
        found["fsdp_config"]["transformer_layer_cls_to_wrap"] = layers
    return found


def saved(model: nn.Module, folder: Path) -> Path:
    """A checkpoint, which transformers writes in the first process only."""
    model.save_pretrained(folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return folder


def in_both(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def held_are(parameters: dict[str, Tensor], case: str, start: nn.Module) -> bool:
    values = dict(start.named_parameters())
    return all(torch.equal(parameters[name][mask], values[name][mask]) for name, mask in held_masks(case).items())


def beside_held(parameters: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    return {name: value for name, value in parameters.items() if name not in held_masks(case)}


# -- adapters on queries and keys: freeze -----------------------------------------------------------------------------


def with_adapters(engine: str, folder: Path, *, case: str, batch_size: int = 2) -> Found:
    chosen = options(engine, case, batch_size=batch_size)
    torch.manual_seed(0)
    model = get_peft_model(tiny(case), LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"]))
    trainer = run(model, folder, RouteGuard(), **chosen)
    return {**state(trainer), "folder": str(folder)}


def check_adapters(mine: Found, theirs: Found, *, case: str) -> None:
    in_both(mine["parameters"], theirs["parameters"])
    one = with_adapters("", Path(f"{mine['folder']} alone"), case=case, batch_size=4)
    for name, value in one["parameters"].items():
        torch.testing.assert_close(mine["parameters"][name], value, rtol=1e-5, atol=1e-6)
    routes = find_routes(tiny(case))
    for route in routes:
        module = route.parameter.removesuffix(".weight")
        b = next(v for name, v in mine["parameters"].items() if f"{module}.lora_B" in name)
        assert not take_rows(b, routes.rows_of(route.parameter)).any()
        assert b.any() == (routes.rows_of(route.parameter) is not None)  # the gate's rows beside them learn
    assert all(v.any() for name, v in mine["parameters"].items() if "v_proj.lora_B" in name)


# -- adapters pulled to their start -----------------------------------------------------------------------------------


def pulled_adapters(engine: str, folder: Path, *, mode: str = "l2_sp", batch_size: int = 2) -> Found:
    chosen = options(engine, "lfm2", batch_size=batch_size)
    torch.manual_seed(0)
    model = get_peft_model(tiny("lfm2"), LoraConfig(r=4, target_modules="all-linear"))
    trainer = run(model, folder, RouteGuard(mode), **chosen)
    return {**state(trainer), "folder": str(folder)}


def check_pulled_adapters(mine: Found, theirs: Found) -> None:
    in_both(mine["parameters"], theirs["parameters"])
    alone = Path(f"{mine['folder']} alone")
    one = pulled_adapters("", alone, batch_size=4)["parameters"]
    free = pulled_adapters("", alone / "free", mode="track", batch_size=4)["parameters"]
    factors = [name for name in one if ".lora_B" in name]
    assert factors
    for name, value in one.items():
        torch.testing.assert_close(mine["parameters"][name], value, rtol=1e-5, atol=1e-6)
    assert sum(one[name].norm() ** 2 for name in factors) < 0.7 * sum(free[name].norm() ** 2 for name in factors)


# -- DPO with adapters: PEFT makes them trainable again at every step --------------------------------------------------


def preferences(engine: str, folder: Path, *, case: str, switched: bool) -> Found:
    chosen = settings(engine, "whole tensors, freeze") | options(engine, case)
    targets = ["q_proj", "k_proj", "v_proj"]
    if switched:  # one adapter, switched off for the reference policy
        config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        trainer = dpo(tiny(case), folder, RouteGuard(), peft_config=config, **chosen)
    else:  # a second adapter is the reference policy
        trainer = dpo(adapted(case), folder, RouteGuard(), **chosen)
    return state(trainer)


def check_preferences(mine: Found, theirs: Found, *, case: str) -> None:
    in_both(mine["parameters"], theirs["parameters"])
    routes = find_routes(tiny(case))
    for name, value in mine["parameters"].items():
        if ".lora_B." in name:
            weight = f"{name.split('.lora_B.')[0].removeprefix('base_model.model.')}.weight"
            routed = weight in routes.parameters
            learns = ".default." in name and (not routed or routes.rows_of(weight) is not None)
            assert value.any() == learns, name
            assert not (routed and take_rows(value, routes.rows_of(weight)).any()), name


# -- a start that is named, and a restore by hand --------------------------------------------------------------------


def named_start(engine: str, folder: Path) -> Found:
    """The start is another model's, in a checkpoint; then a restore by hand, and under DeepSpeed a second training."""
    chosen = options(engine, "lfm2")
    base = saved(tiny("lfm2", seed=1), folder / "base")
    trainer = run(tiny("lfm2"), folder, RouteGuard(Track(), QKRestore(), reference=str(base)), **chosen)
    found = {**state(trainer), "by hand": error_of(lambda: restore(trainer.model, base))}
    if engine.startswith("zero"):
        found["second"] = error_of(trainer.train)
    return found


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def check_named_start(mine: Found, theirs: Found) -> None:
    in_both(mine["parameters"], theirs["parameters"])
    assert held_are(mine["parameters"], "lfm2", tiny("lfm2", seed=1))
    assert not held_are(mine["parameters"], "lfm2", tiny("lfm2"))
    assert "routeguard restore BASE TUNED --out FIXED" in mine["by hand"] and "QKRestore()" in mine["by hand"]
    assert "Make a new Trainer" in mine.get("second", "Make a new Trainer")


# -- callbacks that write over the model at the end --------------------------------------------------------------------


class Shifts(TrainerCallback):
    """Stands for an average that is written over the model after the guard's restore."""

    @torch.no_grad()
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        parameters = list(model.parameters())
        with self.gathered(parameters):
            for parameter in parameters:
                parameter.add_(SHIFT)

    def gathered(self, parameters: list[Any]) -> Any:
        if not hasattr(parameters[0], "ds_id"):
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def overwritten(engine: str, folder: Path, *, case: str) -> Found:
    def trained(name: str, *callbacks: TrainerCallback) -> Trainer:
        chosen = options(engine, case)
        return run(tiny(case), folder / name, *callbacks, **chosen)

    plain = state(trained("plain", RouteGuard(Track(), QKRestore())))["parameters"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shifted = state(trained("shifted", RouteGuard(Track(), QKRestore()), Shifts()))["parameters"]
    frozen = error_of(lambda: trained("frozen", RouteGuard(), Shifts()))
    said = sum("wrote over the restored queries and keys" in str(warning.message) for warning in seen)
    return {"plain": plain, "shifted": shifted, "warnings": said, "frozen": frozen}


def check_overwritten(mine: Found, theirs: Found, *, case: str) -> None:
    in_both(mine["shifted"], theirs["shifted"])
    assert mine["warnings"] == theirs["warnings"] == 1
    assert held_are(mine["shifted"], case, tiny(case)) and held_are(mine["plain"], case, tiny(case))
    for name, value in beside_held(mine["plain"], case).items():
        torch.testing.assert_close(mine["shifted"][name], value + SHIFT)
    assert "is held and changed all the same" in mine["frozen"] + theirs["frozen"]


def bema(engine: str, folder: Path) -> Found:
    chosen = options(engine, "lfm2")
    guards = [RouteGuard(Track(), QKRestore()), BEMACallback(update_freq=1)]
    refusal = error_of(lambda: run(tiny("lfm2"), folder, *guards, **chosen))
    torch.distributed.barrier()
    file = folder / "bema" / "model.safetensors"
    return {"refusal": refusal, "average": load_file(file) if file.is_file() else None}


def check_bema(mine: Found, theirs: Found) -> None:
    assert not mine["refusal"] and held_are(mine["average"], "lfm2", tiny("lfm2"))
    start = dict(tiny("lfm2").named_parameters())
    others = beside_held(mine["average"], "lfm2")
    assert sum(not torch.equal(start[name], value) for name, value in others.items()) > len(others) / 2


def check_bema_refused(mine: Found, theirs: Found) -> None:
    assert all("BEMACallback copies the model" in found["refusal"] for found in (mine, theirs))


# -- FSDP2 that keeps whole parameters after a forward pass ------------------------------------------------------------


def evaluated(engine: str, folder: Path) -> Found:
    """Evaluation before the restore leaves whole parameters behind; the one after it must not use them."""
    chosen = options(engine, "lfm2")
    chosen["fsdp_config"]["reshard_after_forward"] = False
    chosen |= {"eval_strategy": "steps", "eval_steps": 4, "trainer_options": {"eval_dataset": dataset(4)}}
    trainer = run(tiny("lfm2"), folder, RouteGuard(Track(), QKRestore()), **chosen)
    before = next(line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line)
    after = trainer.evaluate()["eval_loss"]
    trainer.train()  # and a second training sees the shards, and goes on from the first start
    return {"before": before, "after": after, **state(trainer), "folder": str(folder)}


def check_evaluated(mine: Found, theirs: Found) -> None:
    chosen = options("", "lfm2", batch_size=4)
    evaluation = {"trainer_options": {"eval_dataset": dataset(4)}}
    one = run(tiny("lfm2"), Path(f"{mine['folder']} alone"), RouteGuard(Track(), QKRestore()), **chosen, **evaluation)
    expected = one.evaluate()["eval_loss"]
    assert abs(mine["after"] - expected) < 1e-5 < 1e-4 < abs(mine["before"] - mine["after"])
    in_both(mine["parameters"], theirs["parameters"])
    assert held_are(mine["parameters"], "lfm2", tiny("lfm2"))


# -- tensor parallelism by transformers' plan, in the Trainer ----------------------------------------------------------


def tensor_parallel(engine: str, folder: Path, *, really: bool = True) -> Found:
    if really:
        from tests.engine_worker import let_accelerate_shard_on_cpus

        let_accelerate_shard_on_cpus()
        AcceleratorState._reset_state(reset_partial_state=True)
    found: Found = {"folder": str(folder)}
    for mode, guard in {"freeze": RouteGuard, "restored": lambda: RouteGuard(Track(), QKRestore())}.items():
        chosen = options("", "llama")
        base = saved(tiny("llama"), folder / "base")
        plan = {"tp_plan": "auto"} if really else {}
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager", **plan)
        if really:
            wrong = error_of(lambda: run(model, folder / "pro", RouteGuard(Track(), "qk_pro"), **chosen))  # noqa: B023
            found["refusal"] = wrong
        found[mode] = state(run(model.train(), folder / mode, guard(), **chosen))
    return found


def check_tensor_parallel(mine: Found, theirs: Found) -> None:
    one = tensor_parallel("", Path(f"{mine['folder']} alone"), really=False)
    for mode in ("freeze", "restored"):
        in_both(mine[mode]["parameters"], theirs[mode]["parameters"])
        assert held_are(mine[mode]["parameters"], "llama", tiny("llama"))
        for name, value in one[mode]["parameters"].items():
            torch.testing.assert_close(mine[mode]["parameters"][name], value, rtol=1e-5, atol=1e-6)
        drift, alone = (
            [line["routeguard/drift_max"] for line in found[mode]["log"] if "routeguard/drift_max" in line]
            for found in (mine, one)
        )
        torch.testing.assert_close(drift, alone, rtol=1e-4, atol=0)
        assert drift and all((value > 0) == (mode == "restored") for value in drift)
    assert "which tensor parallelism splits over processes" in mine["refusal"]


MIXED = "qwen3_5_text"  # keys are whole tensors, queries rows beside a gate's
ADAPTERS = {"adapters": Extra(partial(with_adapters, case=MIXED), partial(check_adapters, case=MIXED))}
PREFERENCES = {
    f"DPO, {'one adapter' if switched else 'reference adapter'}, {case}": Extra(
        partial(preferences, case=case, switched=switched), partial(check_preferences, case=case)
    )
    for case, switched in (("lfm2", True), ("qwen3_next", False))
}
SPLIT = {
    **ADAPTERS,
    **PREFERENCES,
    "named start": Extra(named_start, check_named_start),
    "written over": Extra(partial(overwritten, case=MIXED), partial(check_overwritten, case=MIXED)),
}
EXTRAS: dict[str, dict[str, Extra]] = {
    "ddp": {
        **ADAPTERS,
        "pulled adapters": Extra(pulled_adapters, check_pulled_adapters),
        **PREFERENCES,
        "BEMA": Extra(bema, check_bema),
        "tensor parallel trainer": Extra(tensor_parallel, check_tensor_parallel),  # last: accelerate's state changes
    },
    "fsdp2": {
        **SPLIT,
        "BEMA": Extra(bema, check_bema_refused),
        "evaluated": Extra(evaluated, check_evaluated),
    },
    "zero1": {**SPLIT, "BEMA": Extra(bema, check_bema)},
    "zero2": {**SPLIT, "BEMA": Extra(bema, check_bema)},
    "zero3": {**SPLIT, "BEMA": Extra(bema, check_bema_refused)},
}
