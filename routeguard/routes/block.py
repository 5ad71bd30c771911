"""What a layout reads (the tensors of one attention module) and gives back, and the row arithmetic they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from routeguard.routes.collection import Kind, Role, Rows, merge_rows
from routeguard.routes.config import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, Config, first


class UnknownLayoutError(ValueError):
    """The table does not describe this model (the probe may): not a refusal of what it is."""


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
    rotary_width: int | None = None  # None: as the config says

    def extended(self, extra: Iterable[Piece], *, obstacle: str | None = None) -> Found:
        return replace(self, pieces=(*self.pieces, *extra), obstacle=obstacle or self.obstacle)


Layout = Callable[[Block], "Found | None"]

# Names that projections go by in modules and in checkpoints, most common first.
QUERY = (
    "q_proj", "q_proj.linear", "qkv_proj.q_proj", "Wq", "query", "attention.query", "project_q", "q",
)  # fmt: skip
KEY = ("k_proj", "k_proj.linear", "qkv_proj.k_proj", "Wk", "key", "attention.key", "project_k", "k")
VALUE = ("v_proj", "v_proj.linear", "Wv", "value", "attention.value", "project_v", "v")
OUTPUT = (
    "o_proj", "o_proj.linear", "out_proj", "dense", "c_proj", "attention.output", "attention_out", "o",
)  # fmt: skip
LATENT_NORMS = ("q_a_layernorm", "q_a_norm")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm", "q_proj.norm", "q_b_norm", *LATENT_NORMS)
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "k_proj.norm", "k_rope_only_layernorm")


def interleaved(count: int, stride: int, start: int, stop: int) -> Rows:
    """Rows `[i * stride + start, i * stride + stop)` for i in 0 .. count - 1, merged where they touch."""
    return merge_rows((i * stride + start, i * stride + stop) for i in range(count))


def complement(rows: Rows, total: int) -> Rows:
    """The ranges of `[0, total)` that `rows` (merged) leaves out."""
    edges = [0, *(edge for pair in rows for edge in pair), total]
    return merge_rows(zip(edges[::2], edges[1::2], strict=True))


def which(block: Block, names: Iterable[str]) -> str | None:
    """The first of `names` that has a weight in the block."""
    return next((name for name in names if f"{name}.weight" in block.tensors), None)


def with_bias(
    block: Block, name: str | None, role: Role, rows: Rows | None = None, *, dim: int = 0, shared: bool = False
) -> list[Piece]:
    """The weight's rows and the same rows of the bias, of those that exist. Rows that span everything become None."""
    found: list[Piece] = []
    kinds: tuple[tuple[Kind, int], ...] = (("weight", dim), ("bias", 0))
    for kind, axis in kinds:
        full = f"{name}.{kind}"
        if full in block.tensors:
            whole = rows == ((0, block.shape(full)[axis]),)
            found.append(Piece(full, role, kind, None if whole else rows, axis, shared))
    return found


def output(block: Block) -> list[Piece]:
    return with_bias(block, which(block, OUTPUT), "output")


def norms(block: Block) -> list[Piece]:
    """Gains (and biases) of query and key norms."""
    roles: tuple[tuple[Role, tuple[str, ...]], ...] = (("query", QUERY_NORMS), ("key", KEY_NORMS))
    return [
        Piece(full, role, "norm")
        for role, names in roles
        for name in names
        for full in block.tensors
        if full.startswith(f"{name}.")  # one gain, or one a head (stablelm)
    ]


def has_qk_norm(block: Block) -> bool:
    """Whether the heads themselves are normalised, not only the latent that the queries come from."""
    return any(not piece.name.startswith(tuple(f"{name}." for name in LATENT_NORMS)) for piece in norms(block))


def num_heads(block: Block, q_rows: int) -> int:
    """Query heads of this layer. Raises ValueError when the config names neither heads nor a head width."""
    config = block.config
    per_layer = first(config, ("num_attention_heads_per_layer", "attention_heads_per_layer"))
    heads = per_layer if isinstance(per_layer, (list, tuple)) else first(config, NUM_HEADS)
    if isinstance(heads, (list, tuple)):
        heads = heads[block.layer]
    if heads is not None:
        return int(heads)
    width = first(config, HEAD_DIM)
    if width is None:
        raise UnknownLayoutError(
            f"the config of model type {config.get('model_type')!r} names neither a number of heads "
            f"({', '.join(NUM_HEADS)}) nor a head width ({', '.join(HEAD_DIM)})"
        )
    return q_rows // int(width)


def mismatch(block: Block, name: str, rows: int, expected: str) -> UnknownLayoutError:
    """The tensors contradict the config or the table."""
    width = first(block.config, HEAD_DIM)
    return UnknownLayoutError(
        f"{block.module}.{name} has {rows} rows, which is not {expected} "
        f"(layer {block.layer}, head_dim {width}, hidden size {first(block.config, HIDDEN_SIZE)}); "
        "the table of architectures does not describe this model: register a row with routeguard.register_architecture"
    )
