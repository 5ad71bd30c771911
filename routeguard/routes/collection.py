"""What `find_routes` returns: which rows of which parameters decide where full attention looks.

Everything here is plain data (no torch), immutable, printable and JSON-serialisable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Literal, get_args

from routeguard.routes.wording import as_printed

Role = Literal["query", "key", "value", "output"]
Kind = Literal["weight", "bias", "norm"]
Pairing = Literal["half", "interleaved"]
Rows = tuple[tuple[int, int], ...]

ROLES: tuple[Role, ...] = get_args(Role)
ROUTING_ROLES: tuple[Role, ...] = ("query", "key")
SCHEMA_VERSION = 1
NORMALISED = "queries and keys are normalised"  # an obstacle that QK-Pro, as in the paper, does not mind

_DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Route:
    """One parameter (or some of its rows) of one full-attention layer.

    Attributes:
        layer: decoder layer index, from 0.
        role: "query", "key", and only when asked for "value" or "output".
        kind: "weight", "bias", or "norm" (gain of a query or key norm, or an auxiliary vector that shapes the logits).
        parameter: full name: in `named_parameters()` for a model, in the safetensors header for a checkpoint.
        shape: logical shape of the whole parameter (unpacked for a quantised weight).
        dim: the dimension that `rows` index: 0 for `nn.Linear`, 1 for Conv1D weights `[in, out]`.
        rows: `(start, stop)` ranges along `dim`, in head order; None means the whole parameter.
        dtype: torch's name without the prefix ("bfloat16").
        shared: the same rows also feed the values (MLA latents, tied keys and values).
        sparse: the layer attends globally, but only to what a top-k indexer selects.
        tied_layers: further layers that use this very parameter (zamba's shared block).
    """

    layer: int
    role: Role
    kind: Kind
    parameter: str
    shape: tuple[int, ...]
    dim: int = 0
    rows: Rows | None = None
    dtype: str = "float32"
    shared: bool = False
    sparse: bool = False
    tied_layers: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.shape[self.dim] if self.rows is None else count_rows(self.rows)

    @property
    def num_parameters(self) -> int:
        """Scalars held by this route."""
        return prod(self.shape) if self.rows is None else prod(self.shape) // self.shape[self.dim] * self.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes held by this route in its dtype."""
        return self.num_parameters * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class AttentionLayer:
    """Geometry of one full-attention layer: what turns the rows of Q and K into logits.

    Attributes:
        layer: decoder layer index.
        module: name of the attention module that holds the projections.
        num_heads, num_key_value_heads, head_dim: query heads, key heads, and the width of a query or key head.
        rotary_dim: how many of the `head_dim` dimensions carry a rotary embedding (0: none), counted from
            `rotary_offset`.
        rotary_pairing: "half" (dimension i turns with i + rotary_dim / 2) or "interleaved" (2i with 2i + 1).
        qk_norm: queries or keys are normalised before the product.
        product_obstacle: why `Q Kᵀ` of the weights is not the logit form (QK-norm, MLA, a convolution), or None.
        sparse: a top-k indexer limits which keys are seen.
    """

    layer: int
    module: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int = 0
    rotary_offset: int = 0
    rotary_pairing: Pairing = "half"
    qk_norm: bool = False
    product_obstacle: str | None = None
    sparse: bool = False


@dataclass(frozen=True)
class Routes(Sequence[Route]):
    """Immutable collection of routes with the geometry of their layers.

    Iterating gives the routes in layer order. `str()` prints a table; `to_json()` and `from_json()` round-trip.
    """

    routes: tuple[Route, ...]
    attention: tuple[AttentionLayer, ...]
    model_type: str
    layer_kinds: tuple[str, ...]
    num_model_parameters: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, index: Any) -> Any:
        return self.routes[index]

    def __len__(self) -> int:
        return len(self.routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers covered, in order (tied uses included)."""
        return tuple(sorted({layer for route in self.routes for layer in (route.layer, *route.tied_layers)}))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters touched, once each, in order."""
        return tuple(dict.fromkeys(route.parameter for route in self.routes))

    @property
    def num_parameters(self) -> int:
        """Scalars covered, counting a row once even if two roles use it."""
        return sum(
            prod(shape) if rows is None else prod(shape) // shape[dim] * count_rows(rows)
            for shape, dim, rows, _ in self._merged().values()
        )

    @property
    def num_bytes(self) -> int:
        return sum(
            (prod(shape) if rows is None else prod(shape) // shape[dim] * count_rows(rows)) * dtype_bytes(dtype)
            for shape, dim, rows, dtype in self._merged().values()
        )

    @property
    def share(self) -> float:
        """Fraction of the model's parameters that the routes cover, 0 to 1."""
        return self.num_parameters / self.num_model_parameters if self.num_model_parameters else 0.0

    @property
    def all_layers_full(self) -> bool:
        """Whether every layer has full attention: a pure softmax model, or a hybrid with mixers beside it."""
        return bool(self.layer_kinds) and set(self.layer_kinds) <= {"full", "sparse"}

    def geometry(self, layer: int) -> AttentionLayer:
        """The geometry of one covered layer. Raises ValueError for a layer without full attention."""
        for attention in self.attention:
            if attention.layer == layer:
                return attention
        known = [a.layer for a in self.attention]
        raise ValueError(f"layer {layer} is not a covered full-attention layer; covered: {known}")

    def geometry_of(self, route: Route) -> AttentionLayer:
        """The geometry of the attention module that holds `route` (a layer may hold two); ValueError if unknown."""
        inside = [a for a in self.attention if route.parameter.startswith(f"{a.module}.") or not a.module]
        if not inside:
            raise ValueError(
                f"{route.parameter!r} is in no covered attention module: {[a.module for a in self.attention]}"
            )
        return max(inside, key=lambda attention: (len(attention.module), attention.layer == route.layer))

    def rows_of(self, parameter: str) -> Rows | None:
        """All rows of `parameter` that any route covers, merged and sorted; None means the whole parameter."""
        merged = self._merged()
        if parameter not in merged:
            raise ValueError(f"no route in parameter {parameter!r}; parameters with routes: {list(merged)}")
        return merged[parameter][2]

    def select(
        self,
        *,
        layers: Iterable[int] | None = None,
        roles: Iterable[Role] | None = None,
        kinds: Iterable[Kind] | None = None,
    ) -> Routes:
        """The routes whose layer, role and kind are among those given (None: any). Geometry is narrowed too."""
        wanted_layers = None if layers is None else set(layers)
        wanted_roles = None if roles is None else set(roles)
        wanted_kinds = None if kinds is None else set(kinds)
        kept = tuple(
            route
            for route in self.routes
            if (wanted_layers is None or wanted_layers & {route.layer, *route.tied_layers})
            and (wanted_roles is None or route.role in wanted_roles)
            and (wanted_kinds is None or route.kind in wanted_kinds)
        )
        attention = tuple(a for a in self.attention if wanted_layers is None or a.layer in wanted_layers)
        return replace(self, routes=kept, attention=attention)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Routes:
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"routes were written with schema version {version}, this version reads {SCHEMA_VERSION}")
        return cls(
            routes=tuple(route_from_json(route) for route in data["routes"]),
            attention=tuple(AttentionLayer(**layer) for layer in data["attention"]),
            model_type=data["model_type"],
            layer_kinds=tuple(data["layer_kinds"]),
            num_model_parameters=data["num_model_parameters"],
            notes=tuple(data["notes"]),
        )

    @classmethod
    def from_json(cls, text: str) -> Routes:
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        from routeguard.routes.describe import describe_routes

        return describe_routes(self)

    _repr_pretty_ = as_printed

    def _merged(self) -> dict[str, tuple[tuple[int, ...], int, Rows | None, str]]:
        merged: dict[str, tuple[tuple[int, ...], int, Rows | None, str]] = {}
        for route in self.routes:
            rows = route.rows
            if route.parameter in merged:
                earlier = merged[route.parameter][2]
                rows = None if rows is None or earlier is None else merge_rows([*earlier, *rows])
            elif rows is not None:
                rows = merge_rows(rows)
            if rows == ((0, route.shape[route.dim]),):
                rows = None
            merged[route.parameter] = (route.shape, route.dim, rows, route.dtype)
        return merged


def dtype_bytes(dtype: str) -> int:
    """Bytes of one scalar of a torch dtype name. Raises ValueError for an unknown name."""
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]


def count_rows(rows: Rows) -> int:
    """How many rows the ranges hold."""
    return sum(stop - start for start, stop in rows)


def merge_rows(rows: Iterable[tuple[int, int]]) -> Rows:
    """Sort `(start, stop)` ranges and join those that touch or overlap; empty ranges vanish."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(r for r in rows if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def route_from_json(data: Mapping[str, Any]) -> Route:
    """A route from what `dataclasses.asdict` made of it, with JSON in between or not."""
    lists = {"shape": tuple(data["shape"]), "tied_layers": tuple(data["tied_layers"])}
    return Route(**{**data, **lists, "rows": rows_from_json(data["rows"])})


def rows_from_json(rows: Sequence[Sequence[int]] | None) -> Rows | None:
    """Row ranges from the lists that JSON makes of them."""
    return None if rows is None else tuple((int(start), int(stop)) for start, stop in rows)
