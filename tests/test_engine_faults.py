"""A process is killed: in the middle of a step, or while queries and keys are put back at the end. The run resumes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

from routeguard import find_routes, read_drift, verify_checkpoint
from routeguard.training.run_state import read_state
from tests.engines import distributed
from tests.fault_worker import KILLED
from tests.loops import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None or which("g++") is None, reason="needs deepspeed")
ENGINES = ["ddp", "fsdp2", *(pytest.param(f"zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3))]


def in_two_processes(engine: str, folder: Path, what: str) -> Any:
    return distributed("tests.fault_worker", engine, str(folder), what, deepspeed=engine.startswith("zero"))


@pytest.fixture(scope="module", params=ENGINES)
def straight(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The engine, and the folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp(request.param)
    assert in_two_processes(request.param, folder, "straight").returncode == 0
    return request.param, folder


@pytest.mark.parametrize(("what", "last"), [("step", 2), ("restore", 4)])
def test_a_killed_run_resumes_to_the_same_end(what: str, last: int, straight: tuple[str, Path], tmp_path: Path) -> None:
    engine, whole = straight
    killed = in_two_processes(engine, tmp_path, what)
    assert killed.returncode and f"exitcode  : {KILLED}" in killed.stderr
    assert not (tmp_path / "end.0.pt").exists()
    # what lies on the disk is whole, and is from before: the tuned rows, the start, the record up to the kill
    checkpoint = tmp_path / f"checkpoint-{last}"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*"))[-1] == checkpoint.name
    tiny("lfm2").save_pretrained(tmp_path / "base")
    if engine not in ("fsdp2", "zero3"):  # which save their shards
        assert not verify_checkpoint(checkpoint, tmp_path / "base").ok
    assert verify_checkpoint(tmp_path / "base", tmp_path / "routeguard" / "reference.safetensors").ok
    assert read_state(tmp_path) == read_state(whole)
    assert not list(tmp_path.rglob("*.partial"))

    assert in_two_processes(engine, tmp_path, "resume").returncode == 0
    ends = [torch.load(folder / "end.0.pt", weights_only=False) for folder in (whole, tmp_path)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    before = dict(tiny("lfm2").named_parameters())
    assert all(torch.equal(ends[1][name], before[name]) for name in find_routes(tiny("lfm2")).parameters)
    records = [read_drift(folder / "routeguard" / "drift.jsonl")[1] for folder in (whole, tmp_path)]
    # a run that had made its last step makes one more when it is resumed, at a rate of zero: transformers does that
    assert [sample.step for sample in records[1]][:4] == [sample.step for sample in records[0]] == [1, 2, 3, 4]
