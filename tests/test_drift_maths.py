"""The Frobenius drift against its definition in float64, from 1e-2 down to 1e-7, and what all measures share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from routeguard.drift import frobenius
from routeguard.drift.adapters import dora_delta_norm, lora_delta_distance
from routeguard.drift.frobenius import compiled_kernel, squared_distance
from routeguard.drift.routing_form import compiled_pair_kernel, prepare, routing_drift
from routeguard.routes.collection import AttentionLayer
from tests.drift_reference import CHANGES, changed, close, relative_drift

GEOMETRY = AttentionLayer(3, "attn", 4, 2, 8, rotary_dim=4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def expanded(weight: Tensor, start: Tensor) -> Tensor:
    """The form that cancels: the control of the tests below."""
    return weight.square().sum() - 2 * (weight * start).sum() + start.square().sum()


@pytest.mark.parametrize("change", CHANGES)
def test_squared_distance_keeps_its_digits(change: float) -> None:
    start = torch.randn(300, 400)
    weight = changed(start, change)
    exact = (weight.double() - start.double()).square().sum()
    assert close(squared_distance(weight, start), exact)
    if change <= 1e-5:
        assert not close(expanded(weight, start), exact, 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("chunk", [7, 64, 1 << 18])
@pytest.mark.parametrize(
    ("rows", "dim"), [(None, 0), (((0, 3), (5, 9)), 0), (((2, 4), (6, 11)), 1), (((2, 4), (6, 11)), -1), ((), 0)]
)
def test_squared_distance_of_rows_in_every_dtype(
    dtype: torch.dtype, chunk: int, rows: tuple[tuple[int, int], ...] | None, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frobenius, "_CHUNK_CPU", chunk)
    whole, weight = torch.randn(9, 11).to(dtype), torch.randn(9, 11).to(dtype)
    index = range(whole.shape[dim]) if rows is None else [i for a, b in rows for i in range(a, b)]
    index_tensor = torch.tensor(list(index), dtype=torch.long)
    start = whole.index_select(dim, index_tensor)
    exact = (weight.index_select(dim, index_tensor).double() - start.double()).square().sum()
    measured = squared_distance(weight, start, rows=rows, dim=dim)
    assert measured.dtype == torch.float32 and measured.shape == ()
    assert close(measured, exact)
    transposed = squared_distance(weight.T, start.T, rows=rows, dim=(dim % 2) ^ 1)
    assert close(transposed, exact)


def test_bfloat16_is_subtracted_in_float32() -> None:
    weight, start = torch.randn(500).bfloat16(), torch.randn(500).bfloat16()
    exact = (weight.double() - start.double()).square().sum()
    assert close(squared_distance(weight, start), exact, 1e-6)
    assert not close((weight - start).float().square().sum(), exact, 1e-6)


def test_mixed_dtypes_and_gradients_are_no_obstacle() -> None:
    weight, start = torch.nn.Parameter(torch.randn(6, 5)), torch.randn(6, 5).bfloat16()
    measured = squared_distance(weight, start)
    assert close(measured, (weight.detach().double() - start.double()).square().sum())
    assert not measured.requires_grad


def test_relative_drift() -> None:
    start = torch.randn(50, 40)
    weight = changed(start, 1e-6)
    exact = (weight.double() - start.double()).norm() / start.double().norm()
    assert close(relative_drift(weight, start), exact)
    assert float(relative_drift(start, start)) == 0.0


def test_zero_start_reports_the_plain_distance() -> None:
    start = torch.zeros(7)
    assert float(relative_drift(start, start)) == 0.0
    assert float(relative_drift(torch.full((7,), 2.0), start)) == pytest.approx(28**0.5)


def test_nan_is_reported_as_nan() -> None:
    weight = torch.randn(5, 4)
    weight[2, 1] = float("nan")
    assert torch.isnan(relative_drift(weight, torch.randn(5, 4)))


@pytest.mark.parametrize(
    ("weight", "start", "arguments", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(3, 4), {}, "start has shape"),
        (torch.zeros(4, 3), torch.zeros(4, 3), {"rows": ((0, 2),)}, "start has shape"),
        (torch.zeros(4, 3), torch.zeros(2, 3), {"rows": ((3, 5),)}, "do not lie within the 4 rows"),
        (torch.zeros(4, 3), torch.zeros(2, 3), {"rows": ((0, 2),), "dim": 2}, "dim 2 does not exist"),
        (torch.zeros(4, 3, dtype=torch.int8), torch.zeros(4, 3), {}, "dequantise"),
        (torch.zeros(4, 3), torch.zeros(4, 3, device="meta"), {}, "move the start"),
    ],
)
def test_squared_distance_refuses(weight: Tensor, start: Tensor, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        squared_distance(weight, start, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernel_agrees_with_plain_operations(dtype: torch.dtype) -> None:
    kernel = compiled_kernel()
    if kernel is None:
        pytest.skip("torch cannot compile here")
    calls = []

    def counted(now: Tensor, old: Tensor) -> Tensor:
        calls.append(now.shape)
        return kernel(now, old)

    start = torch.randn(64, 1024).to(dtype)
    weight = changed(start, 1e-2)
    exact = (weight.double() - start.double()).square().sum()
    assert close(squared_distance(weight, start, kernel=counted), exact)
    rows = ((0, 8), (40, 50))
    taken = torch.cat([start[a:b] for a, b in rows])
    part = squared_distance(weight, taken, rows=rows, kernel=counted)
    assert close(part, (torch.cat([weight[a:b] for a, b in rows]).double() - taken.double()).square().sum())
    assert calls == [(64, 1024), (8, 1024), (10, 1024)]
    odd = start[:3, :5].contiguous()
    assert close(squared_distance(weight[:3, :5], odd, kernel=counted), (weight[:3, :5] - odd).double().square().sum())
    assert len(calls) == 3


def test_without_a_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Callable[..., Tensor]:
        def fail(*_: Tensor) -> Tensor:
            raise RuntimeError("no C++ compiler")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    for compiled in (compiled_kernel, compiled_pair_kernel):
        compiled.cache_clear()
        assert compiled() is None
        compiled.cache_clear()


def test_nothing_is_read_back_to_the_host() -> None:
    """On the meta device there are no values, so any read of one raises."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    with pytest.raises(RuntimeError):
        bool(meta(1) > 0)
    assert squared_distance(meta(64, 32), meta(8, 32), rows=((0, 4), (6, 10))).shape == ()
    assert relative_drift(meta(64, 32), meta(64, 32)).shape == ()
    reference = prepare(meta(32, 24), meta(16, 24), GEOMETRY, query_bias=meta(32), key_bias=meta(16))
    assert routing_drift(meta(32, 24), meta(16, 24), reference, query_bias=meta(32), key_bias=meta(16)).shape == (4,)
    assert lora_delta_distance(meta(2, 24), meta(32, 2), meta(2, 24), meta(32, 2)).shape == ()
    measured = dora_delta_norm(meta(32, 24), meta(2, 24), meta(32, 2), 2.0, meta(32), start_magnitude=meta(32))
    assert measured.shape == ()


def test_autocast_changes_nothing() -> None:
    query, key, geometry = torch.randn(32, 24), torch.randn(16, 24), GEOMETRY
    now, a, b = changed(query, 1e-3), torch.randn(2, 24), torch.randn(32, 2)
    plain = routing_drift(now, key, prepare(query, key, geometry)), lora_delta_distance(a, b, a, 0 * b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (query @ now.T).dtype == torch.bfloat16
        inside = routing_drift(now, key, prepare(query, key, geometry)), lora_delta_distance(a, b, a, 0 * b)
    assert all(torch.equal(x, y) for x, y in zip(plain, inside, strict=True))
