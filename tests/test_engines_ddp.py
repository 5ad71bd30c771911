"""The guard under DDP: two gloo processes against one process that sees the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from routeguard import read_drift
from tests.engines import CASES, GUARDS, RESUMED, assert_as_one_process, held_masks, launch, loaded, state, train_case
from tests.loops import tiny

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
DDP = CASES["ddp"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    launch("ddp", folder)
    return folder


@pytest.mark.parametrize("name", list(DDP))
def test_both_processes_agree_and_match_one_process(name: str, results: Path, tmp_path: Path) -> None:
    two, other = loaded(results, name), loaded(results, name, rank=1)
    assert all(torch.equal(two["parameters"][n], other["parameters"][n]) for n in two["parameters"])
    one = state(train_case(DDP[name], tmp_path, batch_size=4))
    assert_as_one_process(DDP[name], two, one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in DDP if "restored" in name or "low_lr" in name])
def test_drift_is_logged_once_and_as_in_one_process(name: str, results: Path, tmp_path: Path) -> None:
    train_case(DDP[name], tmp_path, batch_size=4)
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
def test_resuming_is_bit_identical(mode: str, results: Path) -> None:
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
    (name,) = list(held_masks("lfm2"))[:1]
    values = [loaded(results, f"whole tensors, {mode}")["parameters"][name] for mode in GUARDS]
    kept = [torch.equal(value, dict(tiny("lfm2").named_parameters())[name]) for value in values]
    assert kept == [False, True, False, False, True]
    assert not torch.equal(values[0], values[2]) and not torch.equal(values[2], values[3])
