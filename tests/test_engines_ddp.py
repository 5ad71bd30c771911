"""The guard under DDP: two gloo processes against one process that sees the same batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from routeguard import find_routes, read_drift
from tests.ddp_worker import CASES, GUARDS, RESUMED, state, train_case
from tests.loops import tiny

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
GUARDED = [name for name in CASES if "unguarded" not in name]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pair of processes runs everything: importing alone takes seconds."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "-m", "tests.ddp_worker", str(folder)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def loaded(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    return found


def held_rows(case: str) -> dict[str, torch.Tensor]:
    """Which entries of each routed parameter are held."""
    model = tiny(case)
    parameters = dict(model.named_parameters())
    masks: dict[str, torch.Tensor] = {}
    for route in find_routes(model):
        mask = masks.setdefault(route.parameter, torch.zeros(parameters[route.parameter].shape, dtype=torch.bool))
        for start, stop in route.rows or ((0, route.shape[route.dim]),):
            mask[(slice(None),) * route.dim + (slice(start, stop),)] = True
    return masks


@pytest.mark.parametrize("name", list(CASES))
def test_both_processes_agree_and_match_one_process(name: str, results: Path, tmp_path: Path) -> None:
    case, mode, _ = CASES[name]
    two, other = loaded(results, name), loaded(results, name, rank=1)
    assert all(torch.equal(two["parameters"][n], other["parameters"][n]) for n in two["parameters"])
    one = state(train_case(name, tmp_path, batch_size=4))
    start = dict(tiny(case).named_parameters())
    moved = 0
    for parameter, value in one["parameters"].items():
        torch.testing.assert_close(two["parameters"][parameter], value, rtol=1e-5, atol=1e-7)
        moved += not torch.equal(value, start[parameter])
    assert moved > len(start) / 2
    for parameter, mask in held_rows(case).items():
        held = torch.equal(two["parameters"][parameter][mask], start[parameter][mask])
        assert held is (mode in ("freeze", "restored")), parameter
        if not mask.all():
            assert not torch.equal(two["parameters"][parameter][~mask], start[parameter][~mask])


@pytest.mark.parametrize("name", [name for name in GUARDED if "restored" in name or "low_lr" in name])
def test_drift_is_logged_once_and_as_in_one_process(name: str, results: Path, tmp_path: Path) -> None:
    train_case(name, tmp_path, batch_size=4)
    _, expected = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    _, found = read_drift(results / name / "routeguard" / "drift.jsonl")
    assert [sample.step for sample in found] == [sample.step for sample in expected] == [1, 2, 3, 4]
    for one, other in zip(found, expected, strict=True):
        assert one.factors.keys() == other.factors.keys()
        assert list(one.factors.values()) == pytest.approx(list(other.factors.values()), rel=1e-4)
        assert max(one.factors.values()) > 0
    logged = [entry for entry in loaded(results, name)["log"] if "routeguard/drift_max" in entry]
    assert len(logged) >= 2


@pytest.mark.parametrize("mode", RESUMED)
def test_resuming_under_ddp_is_bit_identical(mode: str, results: Path) -> None:
    straight, resumed = loaded(results, f"straight {mode}"), loaded(results, f"resumed {mode}")
    different = [
        name
        for name in straight["parameters"]
        if not torch.equal(straight["parameters"][name], resumed["parameters"][name])
    ]
    assert not different, different
    plain = loaded(results, f"whole tensors, {mode}")
    assert all(torch.equal(straight["parameters"][n], plain["parameters"][n]) for n in plain["parameters"])


def test_the_modes_differ(results: Path) -> None:
    """The control: the cases are not all the same run."""
    (name,) = list(held_rows("lfm2"))[:1]
    values = [loaded(results, f"whole tensors, {mode}")["parameters"][name] for mode in GUARDS]
    kept = [torch.equal(value, dict(tiny("lfm2").named_parameters())[name]) for value in values]
    assert kept == [False, True, False, False, True]
    assert not torch.equal(values[0], values[2]) and not torch.equal(values[2], values[3])
