"""The guard under DeepSpeed ZeRO-1, 2 and 3: two gloo processes that share out the masters, against one process."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_extras import EXTRAS
from tests.engines import (
    CASES,
    RESUMED,
    assert_as_one_process,
    assert_drift_as_one_process,
    assert_modes_differ,
    assert_resumed_bit_for_bit,
    held_masks,
    launch,
    loaded,
    state,
    train_case,
)
from tests.loops import tiny

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its communication over CPUs"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STAGES = [pytest.param(f"zero{stage}", marks=pytest.mark.slow) for stage in (1, 2, 3)]  # two minutes each
ZERO = CASES["zero2"]  # the stages have the same cases


@pytest.fixture(scope="module", params=STAGES)
def results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage") / request.param
    folder.mkdir()
    launch(request.param, folder)
    return folder


@pytest.mark.parametrize("name", list(ZERO))
def test_both_processes_agree_and_match_one_process(name: str, results: Path, tmp_path: Path) -> None:
    two, other = loaded(results, name), loaded(results, name, rank=1)
    assert all(torch.equal(two["parameters"][n], other["parameters"][n]) for n in two["parameters"])
    if name.startswith("bf16"):
        _held_rows_are_those_of_the_start(name, two)
        return  # one process has no float32 masters to compare with
    one = state(train_case(ZERO[name], tmp_path, batch_size=4))
    assert_as_one_process(ZERO[name], two, one, rtol=1e-5, atol=1e-6)


def _held_rows_are_those_of_the_start(name: str, two: dict[str, Any]) -> None:
    case, mode, _ = ZERO[name]
    start = dict(tiny(case).named_parameters())
    for parameter, mask in held_masks(case).items():
        value = two["parameters"][parameter]
        assert value.dtype == torch.bfloat16
        same = torch.equal(value[mask], start[parameter].detach()[mask].bfloat16())
        assert same is (mode in ("freeze", "restored")), parameter


@pytest.mark.parametrize("name", [n for n in ZERO if "restored" in n or "low_lr" in n or "anchor" in n])
def test_drift_is_that_of_one_process(name: str, results: Path, tmp_path: Path) -> None:
    case, mode, specials = ZERO[name]
    train_case((case, mode, {} if "bf16" in name else specials), tmp_path, batch_size=4)
    assert_drift_as_one_process(results / name, tmp_path, rel=5e-2 if "bf16" in name else 1e-4)


@pytest.mark.parametrize("mode", RESUMED)
def test_resuming_is_bit_identical(mode: str, results: Path) -> None:
    assert_resumed_bit_for_bit(results, mode)


@pytest.mark.parametrize("name", ["whole tensors, restored", "rows, restored", "bf16, restored"])
def test_a_checkpoint_after_the_restore_consolidates_to_the_restored_weights(name: str, results: Path) -> None:
    case, _, _ = ZERO[name]
    consolidated = loaded(results, f"zero_to_fp32 {name}")
    start = dict(tiny(case).named_parameters())
    for parameter, mask in held_masks(case).items():
        expected = start[parameter].detach()[mask]
        if "bf16" in name:
            expected = expected.bfloat16().float()
        assert torch.equal(consolidated[parameter][mask], expected), parameter
    moved = sum(not torch.equal(value, start[name]) for name, value in consolidated.items() if name in start)
    assert moved > len(start) / 2


@pytest.mark.parametrize("name", list(EXTRAS["zero2"]))
def test_beside_the_table(name: str, results: Path) -> None:
    EXTRAS[results.name][name].check(*(loaded(results, name, rank) for rank in (0, 1)))


def test_the_modes_differ(results: Path) -> None:
    assert_modes_differ(results)
