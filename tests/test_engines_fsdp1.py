"""FSDP1 as far as it goes: whole tensors frozen in a loop of one's own, with `use_orig_params`.

Through the Trainer it needs a GPU (accelerate refuses other devices); what it refuses is in test_engine_refusals.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from routeguard import find_routes
from tests.engines import distributed
from tests.loops import tiny


@pytest.mark.slow
def test_whole_tensors_stand_still(tmp_path: Path) -> None:
    done = distributed("tests.fsdp1_worker", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    start = {name: parameter.detach() for name, parameter in tiny("lfm2").named_parameters()}
    held = set(find_routes(tiny("lfm2")).parameters)
    for rank in (0, 1):
        guarded, plain = (torch.load(tmp_path / f"{name}.{rank}.pt") for name in ("guarded", "plain"))
        assert {name for name, value in guarded.items() if torch.equal(value, start[name])} == held
        assert not any(torch.equal(plain[name], start[name]) for name in held)
