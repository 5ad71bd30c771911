"""Drift of adapters from their factors against the dense update in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from routeguard.drift.adapters import dora_delta_norm, lora_delta_distance
from tests.drift_reference import CHANGES, changed, close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


ROWS = ((1, 5), (9, 17))


def dense(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return scale * b.double() @ a.double()


def take(tensor: Tensor, rows: tuple[tuple[int, int], ...] | None) -> Tensor:
    return tensor if rows is None else torch.cat([tensor[a:b] for a, b in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_distance_from_a_zero_start_equals_the_dense_norm(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 30).to(dtype), torch.randn(20, 4).to(dtype)
    assert close(lora_delta_distance(a, b, torch.randn_like(a), 0 * b), dense(a, b, 1.0).norm())
    assert float(lora_delta_distance(a, 0 * b, a, 0 * b)) == 0.0


@pytest.mark.parametrize("change", CHANGES)
def test_lora_distance_keeps_its_digits(change: float) -> None:
    a0, b0 = torch.randn(4, 30), torch.randn(20, 4)
    a, b = changed(a0, change), changed(b0, change)
    exact = (dense(a, b, 1.0) - dense(a0, b0, 1.0)).norm()
    assert close(lora_delta_distance(a, b, a0, b0), exact)
    assert float(lora_delta_distance(a, b, a, b)) == 0.0
    if change <= 1e-5:
        stacked_a, stacked_b = torch.cat([a, a0]), torch.cat([b, -b0], 1)
        control = ((stacked_b.T @ stacked_b) * (stacked_a @ stacked_a.T)).sum().clamp_min(0).sqrt()
        assert not close(control, exact, 0.05)


def dora(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    tuned = weight.double() + dense(a, b, scale)
    return magnitude.double()[:, None] * tuned / tuned.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("change", [1.0, *CHANGES])
def test_dora_norm_equals_the_dense_norm(change: float, rows: tuple[tuple[int, int], ...] | None) -> None:
    weight, a, b = torch.randn(20, 30), torch.randn(4, 30), change * torch.randn(20, 4)
    start_magnitude = weight.norm(dim=1)
    magnitude = changed(start_magnitude, change).abs()
    exact = take(dora(weight, a, b, 2.0, magnitude) - dora(weight, a, 0 * b, 2.0, start_magnitude), rows).norm()
    measured = dora_delta_norm(weight, a, b, 2.0, magnitude, start_magnitude=start_magnitude, rows=rows)
    assert close(measured, exact, 1e-4)
    if change == 1.0:
        assert not close(take(dense(a, b, 2.0), rows).norm(), exact, 1e-2)  # LoRA's norm is another


def test_dora_with_a_zero_row_and_an_untouched_adapter() -> None:
    weight, a, b = torch.randn(6, 5), torch.randn(2, 5), torch.randn(6, 2)
    weight[3] = 0
    magnitude = weight.norm(dim=1)
    assert float(dora_delta_norm(weight, a, 0 * b, 2.0, magnitude, start_magnitude=magnitude)) == 0.0
    exact = (dora(weight, a, b, 2.0, magnitude) - weight.double()).norm()
    assert close(dora_delta_norm(weight, a, b, 2.0, magnitude, start_magnitude=magnitude), exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lora_delta_distance(*([torch.zeros(2, 5), torch.zeros(6, 3)] * 2)), r"A \[r, in_features\]"),
        (lambda: lora_delta_distance(*([torch.zeros(2, 5).int(), torch.zeros(6, 2)] * 2)), "dequantise"),
        (
            lambda: lora_delta_distance(torch.zeros(2, 5), torch.zeros(6, 2), torch.zeros(3, 5), torch.zeros(6, 3)),
            "same adapter",
        ),
        (
            lambda: dora_delta_norm(
                torch.zeros(6, 4),
                torch.zeros(2, 5),
                torch.zeros(6, 2),
                1.0,
                torch.zeros(6),
                start_magnitude=torch.zeros(6),
            ),
            "do not fit an update",
        ),
    ],
)
def test_adapter_drift_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
