"""Row arithmetic: in an attention module's tensors, which rows are queries, keys, values.

A layout is a pure function from the tensors of one attention module (`Block`) to `Piece`s. It returns None when the
module does not have the tensors that the layout reads, and raises ValueError when it has them in a shape that
contradicts the config. Notation: H query heads, G key-value heads, hd head width; weights are `[out, in]`.
Here are the common layouts and the index of all; fused tensors and the odd ones have files of their own.
"""

from __future__ import annotations

from routeguard.routes.block import (
    KEY,
    OUTPUT,
    QUERY,
    VALUE,
    Block,
    Found,
    Layout,
    Piece,
    TensorInfo,
    complement,
    has_qk_norm,
    interleaved,
    mismatch,
    norms,
    num_heads,
    output,
    which,
    with_bias,
)
from routeguard.routes.config import NUM_HEADS, first
from routeguard.routes.layouts_fused import (
    codegen,
    falcon,
    fused_blocks,
    fused_columns,
    fused_per_group,
    fused_per_head,
    gated_fused,
    gpt_bigcode,
)
from routeguard.routes.layouts_odd import (
    compressed,
    convolved_keys,
    jetmoe,
    masked_by_values,
    mixed_qk,
    on_top_of,
    shared_block_adapters,
)

__all__ = ["LAYOUTS", "Block", "Found", "Layout", "Piece", "TensorInfo", "complement", "interleaved"]


def separate(block: Block) -> Found | None:
    """Queries and keys in tensors of their own; twice as many query rows as the output reads means a gate per head."""
    query, key, value = which(block, QUERY), which(block, KEY), which(block, VALUE)
    if query is None:
        return None
    out = which(block, OUTPUT)
    q_rows = block.shape(f"{query}.weight")[0]
    heads = num_heads(block, q_rows)
    gated = out is not None and q_rows == 2 * block.shape(f"{out}.weight")[1]
    width = q_rows // heads // (2 if gated else 1)
    if width * heads * (2 if gated else 1) != q_rows:
        raise mismatch(block, f"{query}.weight", q_rows, f"a multiple of {heads} heads")
    pieces = with_bias(block, query, "query", interleaved(heads, 2 * width, 0, width) if gated else None)
    groups = heads
    if key is not None:
        k_rows = block.shape(f"{key}.weight")[0]
        if k_rows % width:
            raise mismatch(block, f"{key}.weight", k_rows, f"a multiple of the head width {width}")
        groups = k_rows // width
        # Without a value projection of its own (gemma4's attention_k_eq_v) the keys are the values too.
        pieces += with_bias(block, key, "key", shared=value is None)
        pieces += with_bias(block, value or key, "value", shared=value is None)
    elif value is not None:
        pieces += with_bias(block, value, "value")
    pieces += output(block) + norms(block)
    return Found(tuple(pieces), heads, groups, width, qk_norm=has_qk_norm(block))


def latent(block: Block) -> Found | None:
    """Multi-head latent attention (DeepSeek): a latent that feeds keys and values, and a rope key beside it."""
    if "kv_b_proj.weight" not in block.tensors:
        return None
    heads = int(first(block.config, NUM_HEADS))
    value_width = int(block.config["v_head_dim"])
    kv_rows, rank = block.shape("kv_b_proj.weight")
    nope = kv_rows // heads - value_width
    pieces, query_width = _latent_queries(block, heads, value_width)
    rope = query_width - nope
    if "kv_a_proj_with_mqa.weight" in block.tensors:
        a_rows = block.shape("kv_a_proj_with_mqa.weight")[0]
        if not 0 <= a_rows - rank <= rope:
            raise mismatch(block, "kv_a_proj_with_mqa.weight", a_rows, f"the latent rank {rank} plus at most {rope}")
        rope = a_rows - rank
        pieces += with_bias(block, "kv_a_proj_with_mqa", "key", ((0, rank),), shared=True)
        if rope:
            pieces += with_bias(block, "kv_a_proj_with_mqa", "key", ((rank, a_rows),))
    pieces += with_bias(block, "kv_b_proj", "key", interleaved(heads, nope + value_width, 0, nope))
    pieces += with_bias(block, "kv_b_proj", "value", interleaved(heads, nope + value_width, nope, nope + value_width))
    pieces += output(block) + norms(block)
    if "kv_a_layernorm.weight" in block.tensors:
        pieces.append(Piece("kv_a_layernorm.weight", "key", "norm", shared=True))
    why = "keys come from a latent (MLA)"
    return Found(tuple(pieces), heads, heads, query_width, obstacle=why, rotary_offset=nope, rotary_width=rope)


def _latent_queries(block: Block, heads: int, value_width: int) -> tuple[list[Piece], int]:
    """Query pieces of MLA and the width of a query head."""
    low_rank = with_bias(block, "q_a_proj", "query")
    if "q_gate_proj.weight" in block.tensors:  # queries and an output gate from one projection, by head
        width = block.shape("q_gate_proj.weight")[0] // heads - value_width
        rows = interleaved(heads, width + value_width, 0, width)
        return low_rank + with_bias(block, "q_gate_proj", "query", rows), width
    name = "q_b_proj" if "q_b_proj.weight" in block.tensors else "q_proj"
    return low_rank + with_bias(block, name, "query"), block.shape(f"{name}.weight")[0] // heads


def automatic(block: Block) -> Found | None:
    """Latent attention if its tensors are there, else separate projections."""
    return latent(block) or separate(block)


def separate_or_fused(block: Block) -> Found | None:
    """Separate projections in memory, `[q | k | v]` in some checkpoints on disk."""
    return separate(block) or fused_blocks(block)


def gated_fused_or_separate(block: Block) -> Found | None:
    """Separate projections in memory, `[gate | q | k | v]` in checkpoints."""
    return gated_fused(block) or separate(block)


LAYOUTS: dict[str, Layout] = {
    "automatic": automatic,
    "separate": separate,
    "latent": latent,
    "separate_or_fused": separate_or_fused,
    "gated_fused": gated_fused_or_separate,
    "fused_blocks": fused_blocks,
    "fused_columns": fused_columns,
    "fused_per_head": fused_per_head,
    "fused_per_group": fused_per_group,
    "falcon": falcon,
    "gpt_bigcode": gpt_bigcode,
    "codegen": codegen,
    "compressed": compressed,
    "jetmoe": jetmoe,
    "masked_by_values": on_top_of(separate, masked_by_values),
    "mixed_qk": on_top_of(separate, mixed_qk),
    "convolved_keys": on_top_of(separate, convolved_keys),
    "shared_block_adapters": on_top_of(separate, shared_block_adapters),
}
