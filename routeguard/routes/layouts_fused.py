"""Layouts of tensors that hold queries, keys and values together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from routeguard.routes.block import (
    Block,
    Found,
    Piece,
    complement,
    has_qk_norm,
    interleaved,
    mismatch,
    norms,
    output,
    which,
    with_bias,
)
from routeguard.routes.collection import Role, Rows, merge_rows
from routeguard.routes.config import NUM_HEADS, NUM_KEY_VALUE_HEADS, Config, first

# (query heads, key-value heads, head width) to (query rows, key rows)
Split = Callable[[int, int, int], tuple[Rows, Rows]]


def fused_blocks(block: Block) -> Found | None:
    """`[q | k | v]`: all query rows, then all key rows, then all value rows."""
    name = which(block, ("qkv_proj", "Wqkv", "query_key_value", "c_attn", "att_proj"))
    return None if name is None else _fused(block, name, _blocks)


def fused_columns(block: Block) -> Found | None:
    """GPT-2's Conv1D, weight `[in, 3D]`: queries, keys and values are columns."""
    name = which(block, ("c_attn",))
    return None if name is None else _fused(block, name, _blocks, dim=1)


def fused_per_head(block: Block) -> Found | None:
    """Each head's query, key and value rows side by side (GPT-NeoX, BLOOM, Persimmon)."""
    name = which(block, ("query_key_value", "c_attn"))
    return None if name is None else _fused(block, name, _per_head, all_heads=True)


def fused_per_group(block: Block) -> Found | None:
    """Each key-value group's query heads, then its key, then its value (Falcon 40B)."""
    name = which(block, ("query_key_value",))
    return None if name is None else _fused(block, name, _per_group)


def falcon(block: Block) -> Found | None:
    """Falcon's three generations, told apart by the config."""
    if block.config.get("new_decoder_architecture"):
        return fused_per_group(block)
    return fused_blocks(block) if block.config.get("multi_query", True) else fused_per_head(block)


def gpt_bigcode(block: Block) -> Found | None:
    """Multi-query: three blocks; multi-head: by head."""
    return fused_blocks(block) if block.config.get("multi_query", True) else fused_per_head(block)


def codegen(block: Block) -> Found | None:
    """Four shards of `[q, v, k]` (mind the order), each with a quarter of the heads."""
    name = which(block, ("qkv_proj",))
    return None if name is None else _fused(block, name, _codegen, all_heads=True)


def gated_fused(block: Block) -> Found | None:
    """`[gate | q | k | v]` rows, as some checkpoints store them."""
    name = which(block, ("gqkv_proj",))
    if name is None:
        return None
    heads, groups = _head_counts(block, all_heads=False)
    total = block.shape(f"{name}.weight")[0]
    width = total // (2 * heads + 2 * groups)
    q, k = heads * width, groups * width
    pieces = with_bias(block, name, "query", ((q, 2 * q),)) + with_bias(block, name, "key", ((2 * q, 2 * q + k),))
    pieces += with_bias(block, name, "value", ((2 * q + k, total),)) + output(block) + norms(block)
    return Found(tuple(pieces), heads, groups, width, qk_norm=has_qk_norm(block))


def _blocks(heads: int, groups: int, width: int) -> tuple[Rows, Rows]:
    return ((0, heads * width),), ((heads * width, (heads + groups) * width),)


def _per_head(heads: int, groups: int, width: int) -> tuple[Rows, Rows]:
    return interleaved(heads, 3 * width, 0, width), interleaved(heads, 3 * width, width, 2 * width)


def _per_group(heads: int, groups: int, width: int) -> tuple[Rows, Rows]:
    per_group = heads // groups
    stride, key = (per_group + 2) * width, per_group * width
    return interleaved(groups, stride, 0, key), interleaved(groups, stride, key, key + width)


def _codegen(heads: int, groups: int, width: int) -> tuple[Rows, Rows]:
    local = heads * width // 4
    return interleaved(4, 3 * local, 0, local), interleaved(4, 3 * local, 2 * local, 3 * local)


def _fused(block: Block, name: str, split: Split, *, dim: int = 0, all_heads: bool = False) -> Found:
    """Pieces of a fused tensor; what is neither query nor key is value. `all_heads`: as many key as query heads."""
    heads, groups = _head_counts(block, all_heads=all_heads)
    total = block.shape(f"{name}.weight")[dim]
    width = total // (heads + 2 * groups)
    if width * (heads + 2 * groups) != total:
        raise mismatch(block, f"{name}.weight", total, f"({heads} + 2 x {groups}) heads")
    query, key = split(heads, groups, width)
    rows: tuple[tuple[Role, Rows], ...] = (
        ("query", query),
        ("key", key),
        ("value", complement(merge_rows([*query, *key]), total)),
    )
    pieces: list[Piece] = [piece for role, part in rows for piece in with_bias(block, name, role, part, dim=dim)]
    pieces += output(block) + norms(block)
    return Found(tuple(pieces), heads, groups, width, qk_norm=has_qk_norm(block))


def _head_counts(block: Block, *, all_heads: bool) -> tuple[int, int]:
    heads = int(first(block.config, NUM_HEADS))
    return heads, heads if all_heads else _num_groups(block.config, heads)


def _num_groups(config: Config, heads: int) -> int:
    old_falcon = config.get("model_type") == "falcon" and not config.get("new_decoder_architecture")
    if old_falcon or config.get("model_type") == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return int(nested["kv_n_heads"])
    return int(first(config, NUM_KEY_VALUE_HEADS, heads))
