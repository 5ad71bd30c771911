"""Row arithmetic: in an attention module's tensors, which rows are queries, keys, values.

A layout is a pure function from the tensors of one attention module (`Block`) to `Piece`s. It returns None when the
module does not have the tensors that the layout reads, and raises ValueError when it has them in a shape that
contradicts the config. Notation: H query heads, G key-value heads, hd head width; weights are `[out, in]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from routeguard.routes.collection import Kind, Role, Rows, merge_rows
from routeguard.routes.config import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, NUM_KEY_VALUE_HEADS, Config, first


@dataclass(frozen=True)
class TensorInfo:
    """One parameter as seen from outside: full name, logical shape, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Block:
    """The tensors of one attention module: `tensors` maps names inside the module ("q_proj.weight") to tensors."""

    layer: int
    module: str
    tensors: Mapping[str, TensorInfo]
    config: Config

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape


@dataclass(frozen=True)
class Piece:
    """Rows of one tensor of a block that have one role. `name` is inside the module; `rows` None is the whole."""

    name: str
    role: Role
    kind: Kind = "weight"
    rows: Rows | None = None
    dim: int = 0
    shared: bool = False


@dataclass(frozen=True)
class Found:
    """What a layout read from a block: the pieces and the head geometry."""

    pieces: tuple[Piece, ...]
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = False
    obstacle: str | None = None
    rotary_offset: int = 0
    rotary_width: int | None = field(default=None)  # None: as the config says


Layout = Callable[[Block], "Found | None"]

_QUERY = ("q_proj", "q_proj.linear", "qkv_proj.q_proj", "Wq", "query", "attention.query", "wq_du", "to_q", "q")
_KEY = ("k_proj", "k_proj.linear", "qkv_proj.k_proj", "Wk", "key", "attention.key", "wk_dv", "to_k", "k")
_VALUE = ("v_proj", "v_proj.linear", "Wv", "value", "attention.value", "wv_dv", "to_v", "v")
_OUTPUT = (
    "o_proj", "o_proj.linear", "out_proj", "dense", "Wo", "c_proj", "attention.output", "wo_ud", "to_out", "o",
)  # fmt: skip
_QUERY_NORMS = (
    "q_norm", "q_layernorm", "query_layernorm", "q_proj.norm", "q_l2_clip", "q_ln", "norm_q", "q_a_layernorm", "q_a_norm", "q_b_norm",
)  # fmt: skip
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "k_proj.norm", "k_ln", "norm_k")


def separate(block: Block) -> Found | None:
    """Queries and keys in tensors of their own; twice as many query rows as the output reads means a gate per head."""
    query, key = _which(block, _QUERY), _which(block, _KEY)
    if query is None:
        return None
    output = _which(block, _OUTPUT)
    q_rows = block.shape(f"{query}.weight")[0]
    heads = _num_heads(block, q_rows)
    gated = output is not None and q_rows == 2 * block.shape(f"{output}.weight")[1]
    width = q_rows // heads // (2 if gated else 1)
    if width * heads * (2 if gated else 1) != q_rows:
        raise _mismatch(block, f"{query}.weight", q_rows, f"a multiple of {heads} heads")
    query_rows = interleaved(heads, 2 * width, 0, width) if gated else None
    pieces = _with_bias(block, query, "query", query_rows)
    num_key_heads = 0
    if key is not None:
        k_rows = block.shape(f"{key}.weight")[0]
        if k_rows % width:
            raise _mismatch(block, f"{key}.weight", k_rows, f"a multiple of the head width {width}")
        num_key_heads = k_rows // width
        value = _which(block, _VALUE)
        # Without a value projection of its own (gemma4's attention_k_eq_v) the keys are the values too.
        tied = value is None
        pieces += _with_bias(block, key, "key", None, shared=tied)
        pieces += _with_bias(block, value or key, "value", None, shared=tied)
    else:
        pieces += [Piece(f"{v}.weight", "value") for v in [_which(block, _VALUE)] if v is not None]
    pieces += _output(block, output)
    norms = _norms(block)
    return Found(tuple(pieces + norms), heads, num_key_heads or heads, width, qk_norm=_has_qk_norm(block))


def latent(block: Block) -> Found | None:
    """Multi-head latent attention (DeepSeek): a latent that feeds keys and values, and a rope key beside it."""
    if "kv_b_proj.weight" not in block.tensors:
        return None
    config = block.config
    heads = int(first(config, NUM_HEADS))
    value_width = int(config["v_head_dim"])
    nope = block.shape("kv_b_proj.weight")[0] // heads - value_width
    rank = block.shape("kv_b_proj.weight")[1]
    pieces: list[Piece] = []
    if "q_b_proj.weight" in block.tensors:
        pieces += [*_with_bias(block, "q_a_proj", "query"), *_with_bias(block, "q_b_proj", "query")]
        query_width = block.shape("q_b_proj.weight")[0] // heads
    elif "q_gate_proj.weight" in block.tensors:  # queries and an output gate from one projection, by head
        query_width = block.shape("q_gate_proj.weight")[0] // heads - value_width
        rows = interleaved(heads, query_width + value_width, 0, query_width)
        pieces += [*_with_bias(block, "q_a_proj", "query"), *_with_bias(block, "q_gate_proj", "query", rows)]
    else:
        pieces += _with_bias(block, "q_proj", "query")
        query_width = block.shape("q_proj.weight")[0] // heads
    rope = query_width - nope
    if "kv_a_proj_with_mqa.weight" in block.tensors:
        a_rows = block.shape("kv_a_proj_with_mqa.weight")[0]
        if not 0 <= a_rows - rank <= rope:
            raise _mismatch(block, "kv_a_proj_with_mqa.weight", a_rows, f"the latent rank {rank} plus at most {rope}")
        pieces += _with_bias(block, "kv_a_proj_with_mqa", "key", ((0, rank),), shared=True)
        if a_rows > rank:
            pieces += _with_bias(block, "kv_a_proj_with_mqa", "key", ((rank, a_rows),))
        rope = a_rows - rank
    pieces += _with_bias(block, "kv_b_proj", "key", interleaved(heads, nope + value_width, 0, nope))
    pieces += _with_bias(block, "kv_b_proj", "value", interleaved(heads, nope + value_width, nope, nope + value_width))
    pieces += _output(block, _which(block, _OUTPUT))
    pieces += _norms(block)
    if "kv_a_layernorm.weight" in block.tensors:
        pieces.append(Piece("kv_a_layernorm.weight", "key", "norm", shared=True))
    return Found(
        tuple(pieces), heads, heads, query_width, obstacle="keys come from a latent (MLA)", rotary_offset=nope, rotary_width=rope
    )  # fmt: skip


def fused_blocks(block: Block) -> Found | None:
    """`[q | k | v]`: all query rows, then all key rows, then all value rows."""
    name = _which(block, ("qkv_proj", "Wqkv", "query_key_value", "c_attn", "att_proj"))
    return None if name is None else _fused(block, name, lambda h, g, d: (((0, h * d),), ((h * d, (h + g) * d),)))


def fused_columns(block: Block) -> Found | None:
    """GPT-2's Conv1D, weight `[in, 3D]`: queries, keys and values are columns."""
    name = _which(block, ("c_attn",))
    if name is None:
        return None
    return _fused(block, name, lambda h, g, d: (((0, h * d),), ((h * d, (h + g) * d),)), dim=1)


def fused_per_head(block: Block) -> Found | None:
    """Each head's query, key and value rows side by side (GPT-NeoX, BLOOM, Persimmon)."""
    name = _which(block, ("query_key_value", "c_attn"))
    if name is None:
        return None
    return _fused(
        block, name, lambda h, g, d: (interleaved(h, 3 * d, 0, d), interleaved(h, 3 * d, d, 2 * d)), force_heads=True
    )


def fused_per_group(block: Block) -> Found | None:
    """Each key-value group's query heads, then its key, then its value (Falcon 40B)."""
    name = _which(block, ("query_key_value",))
    if name is None:
        return None

    def split(h: int, g: int, d: int) -> tuple[Rows, Rows]:
        per = h // g
        return interleaved(g, (per + 2) * d, 0, per * d), interleaved(g, (per + 2) * d, per * d, (per + 1) * d)

    return _fused(block, name, split)


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
    name = _which(block, ("qkv_proj",))
    if name is None:
        return None

    def split(h: int, g: int, d: int) -> tuple[Rows, Rows]:
        local = h * d // 4
        return interleaved(4, 3 * local, 0, local), interleaved(4, 3 * local, 2 * local, 3 * local)

    return _fused(block, name, split, force_heads=True)


def gated_fused(block: Block) -> Found | None:
    """`[gate | q | k | v]` rows, as some checkpoints store them."""
    name = _which(block, ("gqkv_proj",))
    if name is None:
        return separate(block)
    config = block.config
    heads, groups = int(first(config, NUM_HEADS)), int(first(config, NUM_KEY_VALUE_HEADS))
    width = block.shape(f"{name}.weight")[0] // (2 * heads + 2 * groups)
    q, k = heads * width, groups * width
    pieces = _with_bias(block, name, "query", ((q, 2 * q),)) + _with_bias(block, name, "key", ((2 * q, 2 * q + k),))
    pieces += _with_bias(block, name, "value", ((2 * q + k, 2 * q + 2 * k),)) + _output(block, _which(block, _OUTPUT))
    return Found(tuple(pieces + _norms(block)), heads, groups, width, qk_norm=_has_qk_norm(block))


def compressed(block: Block) -> Found | None:
    """DeepSeek-V4: low-rank queries over keys that are the values; only the query side is pure."""
    if "q_b_proj.weight" not in block.tensors or "kv_proj.weight" not in block.tensors:
        return None
    heads = int(first(block.config, NUM_HEADS))
    width = block.shape("q_b_proj.weight")[0] // heads
    pieces = [Piece("q_a_proj.weight", "query"), Piece("q_b_proj.weight", "query")]
    shared = ("kv_proj.weight", "compressor.kv_proj.weight", "compressor.gate_proj.weight", "compressor.position_bias")
    pieces += [Piece(name, "key", shared=True) for name in shared if name in block.tensors]
    pieces += [Piece("kv_proj.weight", "value", shared=True)]
    pieces += [Piece(n, "output") for n in ("o_a_proj.weight", "o_b_proj.weight") if n in block.tensors]
    pieces += [Piece(n, "key", "norm", shared=True) for n in ("kv_norm.weight", "compressor.kv_norm.weight") if n in block.tensors]
    return Found(tuple(pieces + _norms(block)), heads, 1, width, qk_norm=True, obstacle="keys are the values, compressed")


def jetmoe(block: Block) -> Found | None:
    """Each query expert projects `G * hd` rows; keys are the first half of `kv_proj`.

    The router that picks a token's expert is a discrete choice and stays out.
    """
    if "experts.input_linear.weight" not in block.tensors:
        return None
    width = int(first(block.config, HEAD_DIM))
    groups = block.shape("kv_proj.weight")[0] // 2 // width
    heads = groups * int(block.config.get("num_experts_per_tok", 1))
    pieces = (
        Piece("experts.input_linear.weight", "query", dim=1),
        Piece("kv_proj.weight", "key", rows=((0, groups * width),)),
        Piece("kv_proj.weight", "value", rows=((groups * width, 2 * groups * width),)),
        Piece("experts.output_linear.weight", "output"),
    )
    return Found(pieces, heads, groups, width, obstacle="queries come from routed experts")


def doge(block: Block) -> Found | None:
    """Plain projections, and a mask computed from the values: `dt_proj` and `A` shape the logits, v_proj feeds them."""
    found = separate(block)
    if found is None:
        return None
    extra = [*_with_bias(block, "dt_proj", "key"), *_with_bias(block, "v_proj", "key", shared=True)]
    if "A" in block.tensors:
        extra.append(Piece("A", "key", "norm"))
    return _extended(found, extra)


def zaya(block: Block) -> Found | None:
    """Compressed convolutional attention: a convolution over [q | k] channels after the projections."""
    found = separate(block)
    if found is None:
        return None
    q_rows = block.shape("qkv_proj.q_proj.weight")[0]
    extra: list[Piece] = []
    for name in ("qkv_proj.conv_qk_depthwise", "qkv_proj.conv_qk_grouped"):
        total = block.shape(f"{name}.weight")[0]
        extra += _with_bias(block, name, "query", ((0, q_rows),)) + _with_bias(block, name, "key", ((q_rows, total),))
    if "qk_norm.temp" in block.tensors:
        extra.append(Piece("qk_norm.temp", "key", "norm"))
    return _extended(found, extra, qk_norm=True, obstacle="a convolution mixes queries and keys")


def inkling(block: Block) -> Found | None:
    """Plain projections with a short convolution over the keys, a relative bias and a learned sink."""
    found = separate(block)
    if found is None:
        return None
    extra = [
        Piece(name, "key")
        for name in block.tensors
        if name.startswith(("k_sconv.", "k_proj.sconv."))
    ]
    auxiliary = ("r_proj", "wr_du", "rel_logits_proj", "relative_position_bias", "sink_proj", "attn_sink_proj")
    extra += [Piece(n, "query", "norm") for n in block.tensors if n.split(".")[0] in auxiliary or n.startswith("rel_l2_clip")]
    return _extended(found, extra, obstacle="a short convolution over the keys")


def zamba2(block: Block) -> Found | None:
    """Shared projections plus, for each use of the block, low-rank adapters on the queries and keys."""
    found = separate(block)
    if found is None:
        return None
    extra = [
        Piece(name, "query" if "_q_" in name else "key")
        for name in block.tensors
        if name.startswith(("linear_q_adapter_list.", "linear_k_adapter_list."))
    ]
    return _extended(found, extra, obstacle="adapters add to the projections" if extra else None)


def dory(block: Block) -> Found | None:
    """Unit-norm queries and keys; `sqk` rescales the queries by channel."""
    found = separate(block)
    if found is None:
        return None
    extra = [Piece("sqk", "query", "norm")] if "sqk" in block.tensors else []
    return _extended(found, extra, qk_norm=True, obstacle="queries and keys are normalised")


def automatic(block: Block) -> Found | None:
    """Latent attention if its tensors are there, else separate projections."""
    return latent(block) or separate(block)


LAYOUTS: dict[str, Layout] = {
    "automatic": automatic, "separate": separate, "latent": latent, "fused_blocks": fused_blocks,
    "fused_columns": fused_columns, "fused_per_head": fused_per_head, "fused_per_group": fused_per_group,
    "falcon": falcon, "gpt_bigcode": gpt_bigcode, "codegen": codegen, "gated_fused": gated_fused,
    "compressed": compressed, "jetmoe": jetmoe, "doge": doge, "zaya": zaya, "inkling": inkling, "zamba2": zamba2,
    "dory": dory,
}  # fmt: skip


def interleaved(count: int, stride: int, start: int, stop: int) -> Rows:
    """Rows `[i * stride + start, i * stride + stop)` for i in 0 .. count - 1, merged where they touch."""
    return merge_rows((i * stride + start, i * stride + stop) for i in range(count))


def _which(block: Block, names: Iterable[str]) -> str | None:
    return next((name for name in names if f"{name}.weight" in block.tensors), None)


def _with_bias(block: Block, name: str, role: Role, rows: Rows | None = None, *, dim: int = 0, shared: bool = False) -> list[Piece]:
    """The weight's rows and the same rows of the bias, if there is one. Rows that span everything become None."""
    pieces = []
    for kind, suffix, axis in (("weight", "weight", dim), ("bias", "bias", 0)):
        full = f"{name}.{suffix}"
        if full in block.tensors:
            whole = rows == ((0, block.shape(full)[axis]),)
            pieces.append(Piece(full, role, kind, None if whole else rows, axis, shared))  # type: ignore[arg-type]
    return pieces


def _output(block: Block, name: str | None) -> list[Piece]:
    return [] if name is None else _with_bias(block, name, "output")


def _norms(block: Block) -> list[Piece]:
    pieces = []
    for names, role in ((_QUERY_NORMS, "query"), (_KEY_NORMS, "key")):
        for name in names:
            pieces += [
                Piece(full, role, "norm")  # type: ignore[arg-type]
                for full in (f"{name}.weight", f"{name}.bias", f"{name}.scale")
                if full in block.tensors
            ]
    return pieces


def _has_qk_norm(block: Block) -> bool:
    return any(piece.name.split(".")[0] not in ("q_a_layernorm", "q_a_norm") for piece in _norms(block))


def _num_heads(block: Block, q_rows: int) -> int:
    config = block.config
    per_layer = first(config, ("num_attention_heads_per_layer", "attention_heads_per_layer"))
    if isinstance(per_layer, (list, tuple)):
        return int(per_layer[block.layer])
    heads = first(config, NUM_HEADS)
    if isinstance(heads, (list, tuple)):
        heads = heads[block.layer]
    if heads is None:
        width = first(config, HEAD_DIM)
        if width is None:
            raise ValueError(
                f"the config of model type {config.get('model_type')!r} names neither a number of heads "
                f"({', '.join(NUM_HEADS)}) nor a head width ({', '.join(HEAD_DIM)})"
            )
        return q_rows // int(width)
    return int(heads)


def _fused(
    block: Block,
    name: str,
    split: Callable[[int, int, int], tuple[Rows, Rows]],
    *,
    dim: int = 0,
    force_heads: bool = False,
) -> Found:
    """Pieces of a fused tensor; what is neither query nor key is value. `force_heads`: as many key as query heads."""
    config = block.config
    heads = int(first(config, NUM_HEADS))
    total = block.shape(f"{name}.weight")[dim]
    groups = heads if force_heads else _num_groups(config, heads)
    width = total // (heads + 2 * groups)
    if width * (heads + 2 * groups) != total:
        raise _mismatch(block, f"{name}.weight", total, f"({heads} + 2 x {groups}) heads")
    query, key = split(heads, groups, width)
    value = complement(merge_rows([*query, *key]), total)
    pieces: list[Piece] = []
    for role, rows in (("query", query), ("key", key), ("value", value)):
        pieces += _with_bias(block, name, role, rows, dim=dim)  # type: ignore[arg-type]
    pieces += _output(block, _which(block, _OUTPUT))
    return Found(tuple(pieces + _norms(block)), heads, groups, width, qk_norm=_has_qk_norm(block))


def _num_groups(config: Config, heads: int) -> int:
    model_type = config.get("model_type")
    if model_type == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    if model_type == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return int(nested["kv_n_heads"])
    return int(first(config, NUM_KEY_VALUE_HEADS, heads))


def complement(rows: Rows, total: int) -> Rows:
    """The ranges of `[0, total)` that `rows` (merged) leaves out."""
    edges = [0, *(edge for pair in rows for edge in pair), total]
    return merge_rows(zip(edges[::2], edges[1::2], strict=True))


def _extended(found: Found, extra: list[Piece], *, qk_norm: bool | None = None, obstacle: str | None = None) -> Found:
    return Found(
        found.pieces + tuple(extra),
        found.num_heads,
        found.num_key_value_heads,
        found.head_dim,
        qk_norm=found.qk_norm if qk_norm is None else qk_norm,
        obstacle=obstacle or found.obstacle,
    )


def _mismatch(block: Block, name: str, rows: int, expected: str) -> ValueError:
    width = first(block.config, HEAD_DIM)
    return ValueError(
        f"{block.module}.{name} has {rows} rows, which is not {expected} "
        f"(layer {block.layer}, head_dim {width}, hidden size {first(block.config, HIDDEN_SIZE)}); "
        "the table of architectures does not describe this model: register a row with routeguard.register_architecture"
    )
