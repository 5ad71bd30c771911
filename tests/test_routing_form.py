"""The routing form against the full `d_model × d_model` form in float64, at changes from 1e-2 down to 1e-7."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from routeguard.drift import _products
from routeguard.drift.routing_form import compiled_pair_kernel, prepare, routing_drift
from routeguard.routes.collection import AttentionLayer, Pairing
from tests.drift_reference import CHANGES, changed, close, relative_drift

NUM_HEADS, NUM_KV, HEAD_DIM, D_MODEL = 4, 2, 8, 24


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
