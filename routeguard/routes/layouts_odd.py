"""Layouts of the few attention classes that do more than project: convolutions, experts, compression, adapters."""

from __future__ import annotations

from collections.abc import Callable

from routeguard.routes.block import Block, Found, Layout, Piece, with_bias
from routeguard.routes.config import HEAD_DIM, NUM_HEADS, first


def compressed(block: Block) -> Found | None:
    """DeepSeek-V4: low-rank queries over keys that are the values; only the query side is pure."""
    if "q_b_proj.weight" not in block.tensors or "kv_proj.weight" not in block.tensors:
        return None
    heads = int(first(block.config, NUM_HEADS))
    width = block.shape("q_b_proj.weight")[0] // heads
    shared = ("kv_proj.weight", "compressor.kv_proj.weight", "compressor.gate_proj.weight", "compressor.position_bias")
    pieces = [
        Piece("q_a_proj.weight", "query"),
        Piece("q_b_proj.weight", "query"),
        *(Piece(name, "key", shared=True) for name in shared),
        Piece("kv_proj.weight", "value", shared=True),
        Piece("o_a_proj.weight", "output"),
        Piece("o_b_proj.weight", "output"),
        Piece("q_a_norm.weight", "query", "norm"),
        Piece("kv_norm.weight", "key", "norm", shared=True),
        Piece("compressor.kv_norm.weight", "key", "norm", shared=True),
    ]
    there = tuple(piece for piece in pieces if piece.name in block.tensors)
    return Found(there, heads, 1, width, qk_norm=True, obstacle="keys are the values, compressed")


def jetmoe(block: Block) -> Found | None:
    """Each query expert projects `G * hd` rows; keys are the first half of `kv_proj`.

    The router that picks a token's expert is a discrete choice and stays out.
    """
    if "experts.input_linear.weight" not in block.tensors:
        return None
    width = int(first(block.config, HEAD_DIM))
    groups = block.shape("kv_proj.weight")[0] // 2 // width
    pieces = (
        Piece("experts.input_linear.weight", "query", dim=1),
        Piece("kv_proj.weight", "key", rows=((0, groups * width),)),
        Piece("kv_proj.weight", "value", rows=((groups * width, 2 * groups * width),)),
        Piece("experts.output_linear.weight", "output"),
    )
    heads = groups * int(block.config.get("num_experts_per_tok", 1))
    return Found(pieces, heads, groups, width, obstacle="queries come from routed experts")


def masked_by_values(block: Block, base: Layout) -> Found | None:
    """Doge: a mask computed from the values (`dt_proj`, `A`) is added to the logits, so v_proj shapes them too."""
    found = base(block)
    if found is None:
        return None
    return found.extended(
        [Piece(piece.name, "key", "norm", shared=True) for piece in with_bias(block, "v_proj", "key")]
    )


def mixed_qk(block: Block, base: Layout) -> Found | None:
    """Zaya: queries and keys are averaged with each other, and a convolution runs over the `[q | k]` channels."""
    found = base(block)
    if found is None:
        return None
    # The values have two projections of their own (current and delayed token), so the keys feed no value.
    pieces = [
        Piece(piece.name, piece.role, piece.kind, piece.rows, piece.dim)
        for piece in found.pieces
        if piece.role != "value"
    ]
    pieces += [
        piece
        for name in ("qkv_proj.v_proj_current", "qkv_proj.v_proj_delayed")
        for piece in with_bias(block, name, "value")
    ]
    if "qk_norm.temp" in block.tensors:
        pieces.append(Piece("qk_norm.temp", "key", "norm"))
    q_rows = block.shape("qkv_proj.q_proj.weight")[0]
    for name in ("qkv_proj.conv_qk_depthwise", "qkv_proj.conv_qk_grouped"):
        total = block.shape(f"{name}.weight")[0]
        pieces += with_bias(block, name, "query", ((0, q_rows),)) + with_bias(block, name, "key", ((q_rows, total),))
    why = "queries and keys are mixed by a convolution"
    return Found(tuple(pieces), found.num_heads, found.num_key_value_heads, found.head_dim, qk_norm=True, obstacle=why)


def convolved_keys(block: Block, base: Layout) -> Found | None:
    """Inkling: a short convolution runs over the keys."""
    found = base(block)
    if found is None:
        return None
    names = [name for name in block.tensors if name.startswith(("k_sconv.", "k_proj.sconv."))]
    return found.extended([Piece(name, "key") for name in names], obstacle="a short convolution runs over the keys")


def shared_block_adapters(block: Block, base: Layout) -> Found | None:
    """Zamba2: shared projections plus, for each use of the block, low-rank adapters on the queries and keys."""
    found = base(block)
    if found is None:
        return None
    extra = [
        Piece(name, "query" if "_q_" in name else "key")
        for name in block.tensors
        if name.startswith(("linear_q_adapter_list.", "linear_k_adapter_list."))
    ]
    return found.extended(extra, obstacle="adapters add to the projections" if extra else None)


def on_top_of(base: Layout, layout: Callable[[Block, Layout], Found | None]) -> Layout:
    """A layout that extends what another one finds."""

    def extended(block: Block) -> Found | None:
        return layout(block, base)

    extended.__doc__ = layout.__doc__
    return extended
