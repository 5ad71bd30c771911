"""The guard under DDP: two gloo processes against one process that sees the same batches."""

from __future__ import annotations

from pathlib import Path

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
    launch,
    loaded,
    state,
    train_case,
)

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
    assert_drift_as_one_process(results / name, tmp_path, rel=1e-4)
    logged = [entry for entry in loaded(results, name)["log"] if "routeguard/drift_max" in entry]
    assert len(logged) >= 2


@pytest.mark.parametrize("mode", RESUMED)
def test_resuming_is_bit_identical(mode: str, results: Path) -> None:
    assert_resumed_bit_for_bit(results, mode)


@pytest.mark.parametrize("name", list(EXTRAS["ddp"]))
def test_beside_the_table(name: str, results: Path) -> None:
    EXTRAS["ddp"][name].check(*(loaded(results, name, rank) for rank in (0, 1)))


def test_the_modes_differ(results: Path) -> None:
    assert_modes_differ(results)
