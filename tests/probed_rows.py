"""What the autograd probe found in a block, in a form that reads well beside the expected rows."""

from __future__ import annotations

from typing import Any

from routeguard.routes.probe import ProbedBlock, ProbeResult

HIDDEN, HEADS, HEAD_DIM = 64, 4, 16


def rows_of(block: ProbedBlock) -> dict[str, tuple[Any, ...]]:
    """{name inside the block: (dim, query rows, key rows, value rows, bias rows)}."""
    return {
        tensor.parameter.rpartition(block.module + ".")[2]: (
            tensor.dim,
            tensor.query_rows,
            tensor.key_rows,
            tensor.value_rows,
            tensor.bias_rows,
        )
        for tensor in block.tensors
    }


def last_global(result: ProbeResult) -> ProbedBlock:
    return [block for block in result.blocks if block.global_attention][-1]


def per_head(start: int, stop: int, step: int, count: int = HEADS) -> tuple[tuple[int, int], ...]:
    return tuple((start + step * head, stop + step * head) for head in range(count))


def query(*ranges: tuple[int, int], dim: int = 0) -> tuple[Any, ...]:
    return dim, ranges, (), (), ()


def key(*ranges: tuple[int, int]) -> tuple[Any, ...]:
    return 0, (), ranges, (), ()


def value(*ranges: tuple[int, int]) -> tuple[Any, ...]:
    return 0, (), (), ranges, ()


def bias(*ranges: tuple[int, int]) -> tuple[Any, ...]:
    return 0, (), (), (), ranges
