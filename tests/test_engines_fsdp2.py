"""The guard under FSDP2: two gloo processes, each with a part of every tensor, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from routeguard import find_routes
from routeguard.protect.rows import take_rows
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
from tests.loops import tiny
from tests.sharded_loops import LOOPS, loop

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FSDP2 = CASES["fsdp2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    launch("fsdp2", folder)
    return folder


@pytest.mark.parametrize("name", list(FSDP2))
def test_both_processes_agree_and_match_one_process(name: str, results: Path, tmp_path: Path) -> None:
    two, other = loaded(results, name), loaded(results, name, rank=1)
    assert all(torch.equal(two["parameters"][n], other["parameters"][n]) for n in two["parameters"])
    one = state(train_case(FSDP2[name], tmp_path, batch_size=4))
    close = {"rtol": 3e-2, "atol": 6e-3} if "bf16" in name else {"rtol": 1e-5, "atol": 1e-6}
    assert_as_one_process(FSDP2[name], two, one, **close)


@pytest.mark.parametrize("name", [n for n in FSDP2 if "restored" in n or "low_lr" in n or "anchor" in n])
def test_drift_is_that_of_one_process(name: str, results: Path, tmp_path: Path) -> None:
    train_case(FSDP2[name], tmp_path, batch_size=4)
    assert_drift_as_one_process(results / name, tmp_path, rel=2e-2 if "bf16" in name else 1e-4)
    logged = [entry for entry in loaded(results, name)["log"] if "routeguard/drift_max" in entry]
    assert len(logged) >= 2


@pytest.mark.parametrize("mode", RESUMED)
def test_resuming_is_bit_identical(mode: str, results: Path) -> None:
    assert_resumed_bit_for_bit(results, mode)


@pytest.mark.parametrize("name", list(EXTRAS["fsdp2"]))
def test_beside_the_table(name: str, results: Path) -> None:
    EXTRAS["fsdp2"][name].check(*(loaded(results, name, rank) for rank in (0, 1)))


def test_the_modes_differ(results: Path) -> None:
    assert_modes_differ(results)


@pytest.mark.parametrize("name", list(LOOPS))
def test_loops_over_split_models_are_those_of_one_process(name: str, results: Path) -> None:
    both = [loaded(results, name, rank) for rank in (0, 1)]
    one = loop(*LOOPS[name], really=False)
    for parameter, value in one["parameters"].items():
        assert torch.equal(both[0]["parameters"][parameter], both[1]["parameters"][parameter])
        torch.testing.assert_close(both[0]["parameters"][parameter], value, rtol=1e-5, atol=1e-6)
    _, case, roles, mode = LOOPS[name]
    start = dict(tiny(case).named_parameters())
    for route in find_routes(tiny(case), roles=roles):  # type: ignore[arg-type]
        before, after = (take_rows(p[route.parameter], route.rows, route.dim) for p in (start, both[0]["parameters"]))
        assert torch.equal(before, after) is (mode == "freeze"), route
    for sample in both:
        for found, expected in zip(sample["drift"], one["drift"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4) and max(found.values()) > 0
    here = [sample["num_held_here"] for sample in both]
    assert sum(here) == one["num_held_here"]
    if "process only" in name:
        assert min(here) == 0 < max(here)
