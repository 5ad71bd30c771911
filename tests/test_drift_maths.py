"""The drift formulas against their definitions in float64, at changes from 1e-2 down to 1e-7."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from routeguard.drift import _products, frobenius
from routeguard.drift.adapters import dora_delta_norm, lora_delta_distance, lora_delta_norm
from routeguard.drift.frobenius import compiled_kernel, relative_drift, squared_distance, squared_norm
from routeguard.drift.routing_form import compiled_pair_kernel, prepare, routing_drift
from routeguard.routes.collection import AttentionLayer, Pairing

CHANGES = [1e-2, 1e-4, 1e-5, 1e-6, 1e-7]
NUM_HEADS, NUM_KV, HEAD_DIM, D_MODEL = 4, 2, 8, 24


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def changed(tensor: Tensor, size: float) -> Tensor:
    """The tensor with a relative change of about `size`, rounded to its dtype."""
    return (tensor.double() * (1 + size * torch.randn(tensor.shape, dtype=torch.float64))).to(tensor.dtype)


def close(measured: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool(((measured.double() - expected).abs() <= tolerance * expected.abs()).all())


# ---------------------------------------------------------------------------------------------------- Frobenius


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


def test_relative_drift_and_its_cached_norm() -> None:
    start = torch.randn(50, 40)
    weight = changed(start, 1e-6)
    exact = (weight.double() - start.double()).norm() / start.double().norm()
    assert close(relative_drift(weight, start), exact)
    assert close(relative_drift(weight, start, start_norm=squared_norm(start).sqrt()), exact)
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


def test_autocast_changes_nothing() -> None:
    query, key, geometry = *weights(), layer(rotary_dim=4)
    now, a, b = changed(query, 1e-3), torch.randn(2, 24), torch.randn(32, 2)
    plain = routing_drift(now, key, prepare(query, key, geometry)), lora_delta_norm(a, b, 2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (query @ now.T).dtype == torch.bfloat16
        inside = routing_drift(now, key, prepare(query, key, geometry)), lora_delta_norm(a, b, 2.0)
    assert all(torch.equal(x, y) for x, y in zip(plain, inside, strict=True))


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


# ------------------------------------------------------------------------------------------------- routing form


def layer(
    rotary_dim: int = HEAD_DIM,
    offset: int = 0,
    pairing: str = "half",
    obstacle: str | None = None,
    heads: tuple[int, int] = (NUM_HEADS, NUM_KV),
) -> AttentionLayer:
    return AttentionLayer(
        3, "attn", *heads, HEAD_DIM, rotary_dim, offset, cast(Pairing, pairing), product_obstacle=obstacle
    )


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(NUM_HEADS * HEAD_DIM, D_MODEL), torch.randn(NUM_KV * HEAD_DIM, D_MODEL)


def pair_rows(geometry: AttentionLayer) -> list[tuple[int, int]]:
    first, pairs = geometry.rotary_offset, geometry.rotary_dim // 2
    if geometry.rotary_pairing == "half":
        return [(first + j, first + j + pairs) for j in range(pairs)]
    return [(first + 2 * j, first + 2 * j + 1) for j in range(pairs)]


def turn(weight: Tensor, angles: Tensor, geometry: AttentionLayer) -> Tensor:
    """Rotate pair j of every head by `angles[j]`."""
    turned = weight.clone().view(-1, HEAD_DIM, weight.shape[-1])
    for (a, b), angle in zip(pair_rows(geometry), angles, strict=True):
        x, y = turned[:, a].clone(), turned[:, b].clone()
        turned[:, a], turned[:, b] = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()
    return turned.view(weight.shape)


def logit_forms(query: Tensor, key: Tensor, geometry: AttentionLayer) -> Tensor:
    """`R` of every head at every combination of three angles per pair: `[angles, num_heads, d_model, d_model]`.

    Three equally spaced angles average trigonometric polynomials of degree 2 exactly.
    """
    group = geometry.num_heads // geometry.num_key_value_heads
    keys = key.double().view(geometry.num_key_value_heads, HEAD_DIM, -1).repeat_interleave(group, 0)
    thirds = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64) * (2 * torch.pi / 3)
    forms = []
    for angles in itertools.product(thirds, repeat=geometry.rotary_dim // 2):
        turned = turn(query.double(), torch.tensor(angles), geometry).view(geometry.num_heads, HEAD_DIM, -1)
        forms.append(turned.mT @ keys)
    return torch.stack(forms)


def brute_force(now: tuple[Tensor, Tensor], start: tuple[Tensor, Tensor], geometry: AttentionLayer) -> Tensor:
    old = logit_forms(*start, geometry)
    change = logit_forms(*now, geometry) - old
    return (change.square().sum((0, 2, 3)) / old.square().sum((0, 2, 3))).sqrt()


LAYOUTS = [(0, 0), (8, 0), (4, 0), (4, 4), (4, 2)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("rotary_dim", "offset"), LAYOUTS)
def test_routing_drift_equals_the_full_form(rotary_dim: int, offset: int, pairing: str, change: float) -> None:
    geometry = layer(rotary_dim, offset, pairing)
    start = weights()
    now = changed(start[0], change), changed(start[1], change)
    measured = routing_drift(*now, prepare(*start, geometry))
    assert measured.shape == (NUM_HEADS,) and measured.dtype == torch.float32
    assert close(measured, brute_force(now, start, geometry), 2e-5)


def three_products(now: tuple[Tensor, Tensor], start: tuple[Tensor, Tensor], geometry: AttentionLayer) -> Tensor:
    """`tr(AᵀA) − 2 tr(AᵀB) + tr(BᵀB)` from float32 Grams: what must not be used."""

    def heads(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        group = geometry.num_heads // geometry.num_key_value_heads
        query, key = pair
        return query.view(-1, HEAD_DIM, D_MODEL), key.view(-1, HEAD_DIM, D_MODEL).repeat_interleave(group, 0)

    (q, k), (q0, k0) = heads(now), heads(start)

    def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return ((a[0] @ b[0].mT) * (a[1] @ b[1].mT)).sum((1, 2))

    square = product((q, k), (q, k)) - 2 * product((q, k), (q0, k0)) + product((q0, k0), (q0, k0))
    return (square / product((q0, k0), (q0, k0))).sqrt()


@pytest.mark.parametrize("change", [1e-2, 1e-5, 1e-6, 1e-7])
def test_control_three_products_lose_small_drifts(change: float) -> None:
    geometry = layer(0)
    start = weights()
    now = changed(start[0], change), changed(start[1], change)
    exact = brute_force(now, start, geometry)
    control = three_products(now, start, geometry).nan_to_num(0.0)
    assert close(routing_drift(*now, prepare(*start, geometry)), exact, 2e-5)
    assert close(control, exact, 0.1) == (change > 1e-5)


@pytest.mark.parametrize("side", ["query", "key"])
def test_one_side_alone_counts(side: str) -> None:
    start, geometry = weights(), layer(4)
    now = (changed(start[0], 1e-3), start[1]) if side == "query" else (start[0], changed(start[1], 1e-3))
    assert close(routing_drift(*now, prepare(*start, geometry)), brute_force(now, start, geometry), 2e-5)


def test_nothing_moved_is_exactly_zero() -> None:
    start = weights()
    assert routing_drift(*start, prepare(*start, layer(4))).tolist() == [0.0] * NUM_HEADS


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_turning_pairs_of_query_and_key_alike_is_no_drift(pairing: str) -> None:
    geometry = layer(8, 0, pairing)
    other = layer(8, 0, "interleaved" if pairing == "half" else "half")
    start = weights()
    angles = torch.tensor([0.3, -1.1, 2.0, 0.7])
    now = turn(start[0], angles, geometry), turn(start[1], angles, geometry)
    assert float(relative_drift(now[0], start[0])) > 0.5
    assert float(routing_drift(*now, prepare(*start, geometry)).max()) < 2e-3
    assert float(routing_drift(*now, prepare(*start, other)).min()) > 0.1
    assert float(routing_drift(now[0], start[1], prepare(*start, geometry)).min()) > 0.1
    wide = tuple(t.double() for t in (*now, *start))
    exact = turn(wide[2], angles.double(), geometry), turn(wide[3], angles.double(), geometry)
    assert float(routing_drift(*exact, prepare(wide[2], wide[3], geometry)).max()) < 1e-6


def test_an_invertible_mix_of_dimensions_is_no_drift_without_rotary_only() -> None:
    query, key = (t.double() for t in weights())
    mix = torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64) + 3 * torch.eye(HEAD_DIM, dtype=torch.float64)
    now = (
        (mix.T @ query.view(-1, HEAD_DIM, D_MODEL)).reshape(query.shape),
        (torch.linalg.inv(mix) @ key.view(-1, HEAD_DIM, D_MODEL)).reshape(key.shape),
    )
    assert float(routing_drift(*now, prepare(query, key, layer(0))).max()) < 1e-6
    assert float(routing_drift(*now, prepare(query, key, layer(8))).min()) > 0.1


@pytest.mark.parametrize(("rotary_dim", "offset"), LAYOUTS)
@pytest.mark.parametrize("which", ["both", "query", "key"])
def test_a_bias_is_one_more_input_column(rotary_dim: int, offset: int, which: str) -> None:
    geometry = layer(rotary_dim, offset)
    (query, key), (query_bias, key_bias) = weights(), (torch.randn(32), torch.randn(16))
    query_bias, key_bias = query_bias * (which != "key"), key_bias * (which != "query")
    start = torch.cat([query, query_bias[:, None]], 1), torch.cat([key, key_bias[:, None]], 1)
    now = changed(start[0], 1e-3), changed(start[1], 1e-3)
    given = {"query_bias": which != "key", "key_bias": which != "query"}
    biases = {"query_bias": query_bias, "key_bias": key_bias}
    new = {"query_bias": now[0][:, -1], "key_bias": now[1][:, -1]}
    reference = prepare(query, key, geometry, **{name: biases[name] for name in given if given[name]})
    query_now, key_now = now[0][:, :-1], now[1][:, :-1]
    measured = routing_drift(query_now, key_now, reference, **{name: new[name] for name in given if given[name]})
    assert close(measured, brute_force(now, start, geometry), 2e-5)
    assert not close(routing_drift(query_now, key_now, prepare(query, key, geometry)), measured.double(), 1e-3)


@pytest.mark.parametrize("chunk", [1, 50, 200, 400, 1000])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_parts_do_not_matter(chunk: int, pairing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, geometry = weights(), layer(4, 2, pairing)
    now = changed(start[0], 1e-3), changed(start[1], 1e-3)
    whole = routing_drift(*now, prepare(*start, geometry))
    monkeypatch.setattr(_products, "_CHUNK_CPU", chunk)
    assert torch.allclose(routing_drift(*now, prepare(*start, geometry)), whole, rtol=1e-5, atol=0)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_key_heads_are_shared_in_order(heads: tuple[int, int]) -> None:
    geometry = layer(4, heads=heads)
    start = torch.randn(heads[0] * HEAD_DIM, D_MODEL), torch.randn(heads[1] * HEAD_DIM, D_MODEL)
    now = start[0], start[1].clone()
    now[1][-1] += 1.0
    measured = routing_drift(*now, prepare(*start, geometry))
    group = heads[0] // heads[1]
    assert measured[:-group].tolist() == [0.0] * (heads[0] - group)
    assert float(measured[-group:].min()) > 0
    assert close(measured, brute_force(now, start, geometry))


def test_dtypes_and_layouts() -> None:
    start, geometry = weights(), layer(4)
    now = changed(start[0], 1e-2), changed(start[1], 1e-2)
    expected = routing_drift(*now, prepare(*start, geometry))
    columns = tuple(t.T.contiguous().T for t in (*now, *start))
    apart = tuple(t.view(-1, HEAD_DIM, D_MODEL) for t in (*now, *start))
    for q, k, q0, k0 in (columns, apart):
        assert torch.allclose(routing_drift(q, k, prepare(q0, k0, geometry)), expected, rtol=1e-5)
    half = tuple(t.bfloat16() for t in (*now, *start))
    exact = brute_force(half[:2], half[2:], geometry)
    assert close(routing_drift(*half[:2], prepare(*half[2:], geometry)), exact, 2e-5)
    assert close(routing_drift(*now, prepare(*half[2:], geometry)), brute_force(now, half[2:], geometry), 2e-5)


def test_a_zero_start_reports_the_plain_distance() -> None:
    zero = torch.zeros(32, D_MODEL), torch.zeros(16, D_MODEL)
    now, geometry = weights(), layer(0)
    exact = logit_forms(*now, geometry)[0].square().sum((1, 2)).sqrt()
    assert close(routing_drift(*now, prepare(*zero, geometry)), exact)
    assert routing_drift(*zero, prepare(*zero, geometry)).tolist() == [0.0] * NUM_HEADS


def test_a_reference_that_moved_is_refused() -> None:
    query, key = (torch.nn.Parameter(t) for t in weights())
    stale = prepare(query.detach(), key.detach(), layer())
    sound = prepare(query.detach().clone(), key.detach().clone(), layer())
    optimizer = torch.optim.SGD([query, key], lr=0.1)
    query.grad, key.grad = torch.ones_like(query), torch.ones_like(key)
    optimizer.step()
    with pytest.raises(ValueError, match="changed in place after prepare"):
        routing_drift(query, key, stale)
    assert float(routing_drift(query, key, sound).min()) > 0


def test_prepare_refuses_what_has_no_logit_form() -> None:
    with pytest.raises(ValueError, match="no routing form: queries and keys are normalised"):
        prepare(*weights(), layer(obstacle="queries and keys are normalised"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k: prepare(q.T.contiguous(), k, layer()), "need 32 rows in torch layout"),
        (lambda q, k: prepare(q, q, layer()), "key of layer 3 has shape"),
        (lambda q, k: prepare(q, k, layer(3)), "no pairs"),
        (lambda q, k: prepare(q, k, layer(4, 6)), "no pairs"),
        (lambda q, k: prepare(q, k, layer(heads=(4, 3))), "cannot serve evenly"),
        (lambda q, k: prepare(q.to("meta"), k, layer()), "use one device"),
        (lambda q, k: prepare(q.to(torch.int8), k, layer()), "dequantise"),
        (lambda q, k: routing_drift(q[:, 1:], k, prepare(q, k, layer())), "its start has"),
        (lambda q, k: routing_drift(q, k, prepare(q, k, layer()), query_bias=q[:, 0]), "given both times"),
        (lambda q, k: routing_drift(q, k, prepare(q, k, layer(), key_bias=k[:, 0])), "given both times"),
    ],
)
def test_routing_form_refuses(call: Callable[[Tensor, Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*weights())


def test_nothing_is_read_back_to_the_host() -> None:
    """On the meta device there are no values, so any read of one raises."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    with pytest.raises(RuntimeError):
        bool(meta(1) > 0)
    assert relative_drift(meta(64, 32), meta(8, 32), rows=((0, 4), (6, 10))).shape == ()
    reference = prepare(meta(32, 24), meta(16, 24), layer(4), query_bias=meta(32), key_bias=meta(16))
    assert routing_drift(meta(32, 24), meta(16, 24), reference, query_bias=meta(32), key_bias=meta(16)).shape == (4,)
    assert lora_delta_norm(meta(2, 24), meta(32, 2), 2.0).shape == ()
    assert lora_delta_distance(meta(2, 24), meta(32, 2), 2.0, meta(2, 24), meta(32, 2), 2.0).shape == ()
    assert dora_delta_norm(meta(32, 24), meta(2, 24), meta(32, 2), 2.0, meta(32)).shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_compiled_pair_kernel_agrees_with_the_full_form(pairing: str, dtype: torch.dtype) -> None:
    kernel = compiled_pair_kernel()
    if kernel is None:
        pytest.skip("torch cannot compile here")
    calls = []

    def counted(now: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(now.shape)
        return kernel(now, old)

    geometry = layer(4, 2, pairing)
    start = weights()[0].to(dtype), weights()[1].to(dtype)
    for change in (1e-2, 1e-6) if dtype == torch.float32 else (1e-2,):
        now = changed(start[0], change), changed(start[1], change)
        measured = routing_drift(*now, prepare(*start, geometry), kernel=counted)
        assert close(measured, brute_force(now, start, geometry), 2e-5)
    assert calls[:2] == [(NUM_HEADS, 2, 2, D_MODEL), (NUM_KV, 2, 2, D_MODEL)]
    num_calls = len(calls)
    assert routing_drift(*start, prepare(*start, layer(0)), kernel=counted).tolist() == [0.0] * NUM_HEADS
    assert len(calls) == num_calls


# ----------------------------------------------------------------------------------------------------- adapters

ROWS = ((1, 5), (9, 17))


def dense(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return scale * b.double() @ a.double()


def take(tensor: Tensor, rows: tuple[tuple[int, int], ...] | None) -> Tensor:
    return tensor if rows is None else torch.cat([tensor[a:b] for a, b in rows])


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_norm_equals_the_dense_norm(rows: tuple[tuple[int, int], ...] | None, dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 30).to(dtype), torch.randn(20, 4).to(dtype)
    assert close(lora_delta_norm(a, b, 1.5, rows), take(dense(a, b, 1.5), rows).norm())
    assert float(lora_delta_norm(a, torch.zeros_like(b), 1.5, rows)) == 0.0


@pytest.mark.parametrize("rows", [None, ROWS])
@pytest.mark.parametrize("change", CHANGES)
def test_lora_distance_keeps_its_digits(change: float, rows: tuple[tuple[int, int], ...] | None) -> None:
    a0, b0 = torch.randn(4, 30), torch.randn(20, 4)
    a, b = changed(a0, change), changed(b0, change)
    exact = take(dense(a, b, 2.0) - dense(a0, b0, 2.0), rows).norm()
    assert close(lora_delta_distance(a, b, 2.0, a0, take(b0, rows), 2.0, rows), exact)
    if change <= 1e-5 and rows is None:
        stacked_a, stacked_b = torch.cat([a, a0]), torch.cat([2 * b, -2 * b0], 1)
        control = ((stacked_b.T @ stacked_b) * (stacked_a @ stacked_a.T)).sum().clamp_min(0).sqrt()
        assert not close(control, exact, 0.05)


def test_lora_distance_from_a_zero_start_and_with_another_scale() -> None:
    a0, b0 = torch.randn(4, 30), torch.randn(20, 4)
    a, b = torch.randn(4, 30), torch.randn(20, 4)
    assert close(lora_delta_distance(a, b, 2.0, a0, torch.zeros(20, 4), 2.0), dense(a, b, 2.0).norm())
    exact = (dense(a, b, 0.5) - dense(a0, b0, 3.0)).norm()
    assert close(lora_delta_distance(a, b, 0.5, a0, b0, 3.0), exact)
    assert float(lora_delta_distance(a, b, 0.5, a, b, 0.5)) == 0.0


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
    if change >= 1e-2:
        assert close(dora_delta_norm(weight, a, b, 2.0, magnitude, rows=rows), exact, 1e-3)
    if change == 1.0:
        assert not close(lora_delta_norm(a, b, 2.0, rows), exact, 1e-2)


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
        (lambda: lora_delta_norm(torch.zeros(2, 5), torch.zeros(6, 3), 1.0), r"A \[r, in_features\]"),
        (lambda: lora_delta_norm(torch.zeros(2, 5), torch.zeros(6, 2), 1.0, ((0, 7),)), "do not lie within"),
        (lambda: lora_delta_norm(torch.zeros(2, 5).int(), torch.zeros(6, 2), 1.0), "dequantise"),
        (
            lambda: lora_delta_distance(
                torch.zeros(2, 5), torch.zeros(6, 2), 1.0, torch.zeros(3, 5), torch.zeros(6, 3), 1.0
            ),
            "same adapter",
        ),
        (
            lambda: dora_delta_norm(torch.zeros(6, 4), torch.zeros(2, 5), torch.zeros(6, 2), 1.0, torch.zeros(6)),
            "do not fit an update",
        ),
    ],
)
def test_adapter_drift_refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
