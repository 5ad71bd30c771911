"""What an engine cannot carry is refused before training, with what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from routeguard import L2SP, Anchor, Average, Freeze, LowLR, QKPro, QKRestore, Track
from routeguard.protect.held import held_parameters
from routeguard.routes.find import find_routes
from routeguard.training.engines import (
    engine_of,
    refuse_split_rows,
    refuse_unread_masters,
    refuse_unsupported_engine,
)
from tests.loops import tiny


def trainer(engine: str | None, *, use_orig_params: bool = True, **deepspeed: Any) -> Any:
    """What the checks look at of a Trainer on an engine; `deepspeed` are blocks of its config."""
    version = 1 if engine == "FSDP1" else 2
    plugin = SimpleNamespace(fsdp_version=version, use_orig_params=use_orig_params)
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=SimpleNamespace(deepspeed_config=deepspeed))
    return SimpleNamespace(
        is_deepspeed_enabled=engine == "DeepSpeed",
        is_fsdp_enabled=engine in ("FSDP1", "FSDP2"),
        accelerator=SimpleNamespace(state=state),
    )


@pytest.mark.parametrize("engine", [None, "FSDP1", "FSDP2", "DeepSpeed"])
def test_the_engine_is_named(engine: str | None) -> None:
    found = engine_of(trainer(engine))
    assert (None if found is None else found.name) == engine


def test_a_model_that_transformers_has_split_is_noticed() -> None:
    class Split(torch.Tensor):
        placements, device_mesh = (), None

    theirs = trainer(None)
    theirs.model = SimpleNamespace(parameters=lambda: [torch.zeros(1), torch.zeros(1).as_subclass(Split)])
    found = engine_of(theirs)
    assert found is not None and found.name == "tensor parallelism"
    with pytest.raises(ValueError, match="whole matrices, which tensor parallelism splits"):
        refuse_unsupported_engine(found, Track(), QKPro())


def test_masters_that_are_not_in_this_runs_optimizer() -> None:
    zero = SimpleNamespace(optimizer=SimpleNamespace(single_partition_of_fp32_groups=[]))
    refuse_unread_masters(SimpleNamespace(), zero)
    with pytest.raises(ValueError, match="stage 0 in 16 bits"):
        refuse_unread_masters(SimpleNamespace(model_wrapped=SimpleNamespace(optimizer=None)), SimpleNamespace())
    with pytest.raises(ValueError, match=r"second train\(\) of one Trainer under DeepSpeed"):
        refuse_unread_masters(SimpleNamespace(model_wrapped=SimpleNamespace(optimizer=zero)), SimpleNamespace())


@pytest.mark.parametrize(
    ("engine", "protect", "restore", "match"),
    [
        ("FSDP1", LowLR(0.1), None, "flattened"),
        ("FSDP1", Anchor(1.0), None, "fsdp_version: 2"),
        ("FSDP1", Track(), QKRestore(), "with restore"),
        ("DeepSpeed", Track(), QKPro(), "whole matrices"),
        ("FSDP2", Track(), QKPro(), "whole matrices"),
        ("FSDP2", Track(), Average(0.2), r"routeguard average BASE TUNED --out FIXED --alpha 0\.2"),
        ("DeepSpeed", Track(), Average(), "whole weights"),
        ("FSDP2", L2SP(), None, "train with DDP"),
        ("DeepSpeed", L2SP(), None, "pulls whole weights"),
    ],
)
def test_modes_that_an_engine_cannot_carry(engine: str, protect: Any, restore: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        refuse_unsupported_engine(engine_of(trainer(engine)), protect, restore)
    refuse_unsupported_engine(engine_of(trainer(None)), protect, restore)


def test_fsdp1_needs_the_original_parameters() -> None:
    with pytest.raises(ValueError, match="use_orig_params"):
        refuse_unsupported_engine(engine_of(trainer("FSDP1", use_orig_params=False)), Freeze(), None)
    refuse_unsupported_engine(engine_of(trainer("FSDP1")), Freeze(), None)


@pytest.mark.parametrize(
    ("protect", "block", "refused"),
    [
        (LowLR(0.1), "optimizer", True),
        (Anchor(1.0), "optimizer", True),
        (Freeze(), "optimizer", False),
        (Track(), "optimizer", False),
        (LowLR(0.1), "scheduler", True),
        (Anchor(1.0), "scheduler", False),
    ],
)
def test_blocks_of_a_deepspeed_config_that_take_routing_over(protect: Any, block: str, refused: bool) -> None:
    theirs = trainer("DeepSpeed", **{block: {"type": "any"}})
    if refused:
        with pytest.raises(ValueError, match=f"its own '{block}' block"):
            refuse_unsupported_engine(engine_of(theirs), protect, None)
    else:
        refuse_unsupported_engine(engine_of(theirs), protect, None)
    refuse_unsupported_engine(engine_of(trainer("DeepSpeed")), protect, None)


@pytest.mark.parametrize(
    ("engine", "protect", "refused"),
    [
        ("FSDP2", Freeze(), False),
        ("FSDP2", Track(), False),
        ("FSDP2", LowLR(0.1), True),
        ("FSDP2", Anchor(1.0), True),
        ("FSDP1", Freeze(), True),
        ("DeepSpeed", Freeze(), False),
        ("DeepSpeed", Anchor(1.0), True),
        (None, LowLR(0.1), False),
    ],
)
def test_rows_beside_others(engine: str | None, protect: Any, refused: bool) -> None:
    for case, has_rows in (("qwen3_5_text", True), ("lfm2", False)):
        model = tiny(case)
        held = held_parameters(model, find_routes(model))
        if refused and has_rows:
            with pytest.raises(ValueError, match="routing rows beside others"):
                refuse_split_rows(engine_of(trainer(engine)), protect, held)
        else:
            refuse_split_rows(engine_of(trainer(engine)), protect, held)


def test_drift_of_adapters_inside_shards() -> None:
    model = get_peft_model(tiny("lfm2"), LoraConfig(r=2, target_modules=["q_proj"]))
    held = held_parameters(model, find_routes(model))
    with pytest.raises(ValueError, match="is an adapter"):
        refuse_split_rows(engine_of(trainer("FSDP2")), Track(), held)
    refuse_split_rows(engine_of(trainer("FSDP2")), Freeze(), held)
    refuse_split_rows(engine_of(trainer(None)), Track(), held)
