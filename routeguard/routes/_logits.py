"""Read attention logits: which factors they are a product of, and which positions their mask leaves visible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

PRODUCTS = ("BmmBackward0", "BaddbmmBackward0")
_MASKED = 5e3  # logits this far below the best one of their row are masked (masks use -1e4 or less)


def walk(node: Any, *, limit: int, stop: tuple[str, ...] = ()) -> Iterator[Any]:
    """Nodes of the autograd graph behind `node`, nearest first, at most `limit`, not past those named in `stop`."""
    queue: list[Any] = [node]
    seen: set[Any] = set()
    while queue and len(seen) < limit:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node.name() not in stop:
            queue.extend(following for following, _ in node.next_functions)


def products(logits: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The batched products of two activations that `logits` are a sum of, as (left, right) factors."""
    found = []
    for node in walk(logits.grad_fn, limit=60, stop=(*PRODUCTS, "MmBackward0", "AddmmBackward0")):
        if node.name() == "BmmBackward0":
            factors = node._saved_self, node._saved_mat2
        elif node.name() == "BaddbmmBackward0":
            factors = node._saved_batch1, node._saved_batch2
        else:
            continue
        if all(isinstance(factor, Tensor) and factor.requires_grad and not _is_parameter(factor) for factor in factors):
            found.append(factors)
    return found


def _is_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter or a view of one, rather than something computed from the input."""
    node: Any = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is None or (node.name().endswith("AccumulateGrad") and isinstance(node.variable, nn.Parameter))


def orient(rows: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """`first` [b, m, d] and `second` [b, d, n] as (query, key): one row of logits needs one query only."""
    row = rows.select(-2, rows.shape[-2] - 1)
    at_first, at_second = torch.autograd.grad(
        row, (first, second), torch.ones_like(row), retain_graph=True, allow_unused=True
    )
    num_first = 0 if at_first is None else int((at_first != 0).any(dim=-1).any(dim=0).sum())
    num_second = 0 if at_second is None else int((at_second != 0).any(dim=-2).any(dim=0).sum())
    return (first, second) if num_first <= num_second else (second, first)


def visible_from_logits(rows: Tensor) -> Tensor:
    """Which key positions some head of each query can see: [..., queries, keys] logits to [queries, keys] booleans."""
    best = rows.amax(dim=-1, keepdim=True)
    seen = (rows > best - _MASKED) & (best > -_MASKED)
    return seen.reshape(-1, *seen.shape[-2:]).any(dim=0)


def visible_from_mask(queries: int, keys: int, mask: Any, is_causal: bool, window: Any) -> Tensor:
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.dim() >= 2 and mask.shape[-1] == keys and mask.shape[-2] in (1, queries):
        allowed = mask.detach().cpu() if mask.dtype == torch.bool else _visible_from_additive(mask.detach().cpu())
        seen &= allowed.reshape(-1, *allowed.shape[-2:]).any(dim=0)
    elif is_causal:
        seen = seen.tril(keys - queries)
    if isinstance(window, int) and not isinstance(mask, Tensor):
        seen = seen.triu(keys - queries - window + 1)
    return seen


def _visible_from_additive(mask: Tensor) -> Tensor:
    return mask > -_MASKED
