"""QK-Pro: the closed form against a brute-force minimiser, its limits, its spectrum and its orientation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from routeguard.restoration.spectral import qk_pro
from routeguard.routes.collection import AttentionLayer

NUM_HEADS, NUM_KV, WIDTH, D_MODEL = 4, 2, 3, 7
GROUP = NUM_HEADS // NUM_KV
GEOMETRY = AttentionLayer(5, "attn", NUM_HEADS, NUM_KV, WIDTH)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """query_post, query_pre, key_pre."""
    query_pre = torch.randn(NUM_HEADS * WIDTH, D_MODEL, dtype=torch.float64)
    query_post = query_pre + torch.randn(NUM_HEADS * WIDTH, D_MODEL, dtype=torch.float64)
    scale = torch.tensor([3.0, 1.0, 0.1, 2.0, 0.5, 0.2], dtype=torch.float64)[:, None]
    key_pre = scale * torch.randn(NUM_KV * WIDTH, D_MODEL, dtype=torch.float64)
    return query_post.to(dtype), query_pre.to(dtype), key_pre.to(dtype)


def columns(weight: Tensor, head: int) -> Tensor:
    """Head `head` in the row-vector convention, `[d_model, head_dim]`."""
    return weight[head * WIDTH : (head + 1) * WIDTH].T.double()


def strength(key_pre: Tensor, head: int, ridge: float) -> float:
    """λ of the head: relative to the mean eigenvalue of `K_preᵀ K_pre`."""
    key = columns(key_pre, head // GROUP)
    return ridge * float(torch.trace(key.T @ key)) / WIDTH


@pytest.mark.parametrize("ridge", [0.01, 0.1, 1.0, 10.0])
def test_it_minimises_the_ridge_problem(ridge: float) -> None:
    """Least squares over all entries of one head's Q: rows `Q = Q_post`, and `(K ⊗ I) vec Q / √λ = vec R_pre / √λ`."""
    query_post, query_pre, key_pre = weights()
    new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=ridge)
    for head in range(NUM_HEADS):
        post, pre, key = columns(query_post, head), columns(query_pre, head), columns(key_pre, head // GROUP)
        root = strength(key_pre, head, ridge) ** 0.5
        near = torch.eye(D_MODEL * WIDTH, dtype=torch.float64)
        form = torch.kron(torch.eye(D_MODEL, dtype=torch.float64), key.contiguous()) / root  # row-major vec of Q Kᵀ
        target = torch.cat([post.reshape(-1), (pre @ key.T).reshape(-1) / root])
        best = torch.linalg.lstsq(torch.cat([near, form]), target[:, None]).solution.view(D_MODEL, WIDTH)
        torch.testing.assert_close(columns(new, head), best, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(best, post, atol=1e-3) and not torch.allclose(best, pre, atol=1e-3)


def test_it_equals_the_form_with_the_large_inverse() -> None:
    """`Q_post + (R_pre − Q_post K_preᵀ)(K_pre K_preᵀ + λI)⁻¹ K_pre`, which inverts a `d_model × d_model` matrix."""
    query_post, query_pre, key_pre = weights()
    new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.3)
    for head in range(NUM_HEADS):
        post, pre, key = columns(query_post, head), columns(query_pre, head), columns(key_pre, head // GROUP)
        large = key @ key.T + strength(key_pre, head, 0.3) * torch.eye(D_MODEL, dtype=torch.float64)
        expected = post + (pre @ key.T - post @ key.T) @ torch.linalg.inv(large) @ key
        torch.testing.assert_close(columns(new, head), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_limits(dtype: torch.dtype) -> None:
    query_post, query_pre, key_pre = weights(dtype)
    assert torch.equal(qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.0), query_pre)
    assert torch.equal(qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=float("inf")), query_post)
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    small, large = (qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=r) for r in (1e-12, 1e12))
    torch.testing.assert_close(small, query_pre, **tolerance)
    torch.testing.assert_close(large, query_post, **tolerance)
    middle = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=1.0)
    assert not torch.allclose(middle, query_pre, atol=0.1) and not torch.allclose(middle, query_post, atol=0.1)


@pytest.mark.parametrize("ridge", [1e-300, 5e-324])
def test_a_vanishing_ridge_is_no_division_by_zero(ridge: float) -> None:
    query_post, query_pre, key_pre = weights()
    key_pre[WIDTH - 1] = 0
    assert torch.isfinite(qk_pro(query_post, query_pre, key_pre * 1e-3, GEOMETRY, ridge=ridge)).all()


def test_results_are_new_tensors() -> None:
    query_post, query_pre, key_pre = weights()
    for ridge, source in ((0.0, query_pre), (float("inf"), query_post)):
        new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=ridge)
        new.zero_()
        assert float(source.abs().min()) > 0


def test_each_direction_is_restored_by_its_share() -> None:
    query_post, query_pre, key_pre = weights()
    new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.2)
    shares = []
    for head in range(NUM_HEADS):
        key = columns(key_pre, head // GROUP)
        _, singular, directions = torch.linalg.svd(key, full_matrices=False)
        for value, direction in zip(singular, directions, strict=True):
            asked = (columns(query_pre, head) - columns(query_post, head)) @ direction
            got = (columns(new, head) - columns(query_post, head)) @ direction
            share = value**2 / (value**2 + strength(key_pre, head, 0.2))
            torch.testing.assert_close(got, share * asked, rtol=1e-9, atol=1e-9)
            shares.append(float(share))
    assert min(shares) < 0.2 and max(shares) > 0.9


def test_a_direction_the_keys_ignore_keeps_the_tuned_query() -> None:
    query_post, query_pre, key_pre = weights()
    key_pre[:WIDTH] = torch.outer(torch.tensor([1.0, 2.0, -1.0]).double(), key_pre[0])
    new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.1)
    ignored = torch.tensor([2.0, -1.0, 0.0]).double()
    torch.testing.assert_close(columns(new, 0) @ ignored, columns(query_post, 0) @ ignored)


def test_orientation_is_the_logit_form_and_not_the_same_token_covariance() -> None:
    """The trap: in torch layout `W_Q W_Kᵀ` is `head_dim × head_dim`. Solving for that one projects the input columns
    on the row space of `W_K` and leaves most of the error of the logits."""
    query_post, query_pre, key_pre = weights()
    new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=1e-9)
    for head in range(NUM_HEADS):
        post, pre, key = columns(query_post, head), columns(query_pre, head), columns(key_pre, head // GROUP)
        span = torch.linalg.qr(key).Q
        trap = post + span @ span.T @ (pre - post)
        torch.testing.assert_close(trap.T @ key, pre.T @ key)
        before, ours, theirs = ((q @ key.T - pre @ key.T).norm() for q in (post, columns(new, head), trap))
        assert ours < 1e-6 * before
        assert theirs > 0.3 * before


@pytest.mark.parametrize("ridge", [0.0, 0.1, 1.0])
def test_the_logit_error_falls_with_the_ridge(ridge: float) -> None:
    query_post, query_pre, key_pre = weights()

    def error(query: Tensor) -> float:
        return sum(
            float(((columns(query, h) - columns(query_pre, h)) @ columns(key_pre, h // GROUP).T).norm())
            for h in range(NUM_HEADS)
        )

    weaker = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=10 * ridge + 0.01)
    assert error(qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=ridge)) < error(weaker) < error(query_post)


def test_query_heads_use_the_key_head_of_their_group() -> None:
    query_post, query_pre, key_pre = weights()
    other = key_pre.clone()
    other[:WIDTH] = torch.randn(WIDTH, D_MODEL)
    one = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.5)
    two = qk_pro(query_post, query_pre, other, GEOMETRY, ridge=0.5)
    changed = [not torch.equal(columns(one, head), columns(two, head)) for head in range(NUM_HEADS)]
    assert changed == [True, True, False, False]


def test_lower_precision_is_solved_in_float64() -> None:
    query_post, query_pre, key_pre = weights(torch.bfloat16)
    wide = qk_pro(query_post.double(), query_pre.double(), key_pre.double(), GEOMETRY, ridge=0.3)
    new = qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.3)
    assert new.dtype == torch.bfloat16
    assert torch.equal(new, wide.to(torch.bfloat16))


def test_a_bias_as_one_more_column_is_part_of_the_form() -> None:
    query_post, query_pre, key_pre = weights()
    extra = [torch.cat([t, torch.randn(len(t), 1, dtype=torch.float64)], 1) for t in (query_post, query_pre, key_pre)]
    new = qk_pro(extra[0], extra[1], extra[2], GEOMETRY, ridge=0.3)
    assert new.shape == (NUM_HEADS * WIDTH, D_MODEL + 1)
    assert not torch.allclose(new[:, :-1], qk_pro(query_post, query_pre, key_pre, GEOMETRY, ridge=0.3), atol=1e-3)


def broken(index: int, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    tensors = list(weights())
    tensors[index] = change(tensors[index])
    return tuple(tensors)


def with_nan(tensor: Tensor) -> Tensor:
    tensor[1, 2] = float("nan")
    return tensor


def without_first_key(tensor: Tensor) -> Tensor:
    tensor[:WIDTH] = 0
    return tensor


@pytest.mark.parametrize("ridge", [-0.1, float("nan"), float("-inf")])
def test_an_invalid_ridge_is_refused(ridge: float) -> None:
    with pytest.raises(ValueError, match="ridge must be 0 or more"):
        qk_pro(*weights(), GEOMETRY, ridge=ridge)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda t: t[:-1], "query_post of layer 5 has shape .* need 12 rows"),
        (1, lambda t: t.T, "query_pre of layer 5 has shape"),
        (2, lambda t: t.repeat(2, 1), "key_pre of layer 5 has shape .* need 6 rows"),
        (1, lambda t: t[:, :-1], "read different inputs"),
        (2, lambda t: t[:, :-1], "read different inputs"),
        (0, with_nan, "query_post of layer 5 holds NaN"),
        (2, with_nan, "key_pre of layer 5 holds NaN"),
        (1, lambda t: t.to(torch.int8), "dequantise"),
        (2, without_first_key, r"key heads \[0\] of layer 5 are all zero"),
    ],
)
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_weights_that_do_not_fit_are_refused(
    index: int, change: Callable[[Tensor], Tensor], message: str, ridge: float
) -> None:
    with pytest.raises(ValueError, match=message):
        qk_pro(*broken(index, change), GEOMETRY, ridge=ridge)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot share 3 key heads"):
        qk_pro(*weights(), AttentionLayer(5, "attn", 4, 3, WIDTH), ridge=0.1)
