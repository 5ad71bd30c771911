"""The zoo covers transformers' config mapping, and each of its tiny models builds and runs."""

from __future__ import annotations

import pytest

from tests.zoo.build import build, example_inputs
from tests.zoo.configs import CASES


@pytest.mark.parametrize("name", CASES)
def test_case_builds_on_meta(name: str) -> None:
    model = build(name, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.forward])
def test_case_runs_on_cpu(name: str) -> None:
    import torch

    with torch.no_grad():
        outputs = build(name)(**example_inputs(name))
    assert torch.isfinite(outputs.logits).all()
