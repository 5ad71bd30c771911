"""What a guard holds, tensor by tensor, as plain numbers: kept in `routeguard.json`, shown by the report. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from routeguard.routes.collection import Route, Routes
from routeguard.routes.names import canonical_name


@dataclass(frozen=True)
class CoveredLayer:
    """One full-attention layer: tensors with their held rows and all their rows, and the scalars held."""

    layer: int
    tensors: tuple[tuple[str, int, int], ...]
    num_parameters: int


@dataclass(frozen=True)
class Coverage:
    """What was held.

    Attributes:
        source: the file or folder that tells.
        layers: one entry a layer.
        num_tensors, num_rows, num_parameters, num_bytes: in all, each tensor and row once.
        dtypes: of the held tensors.
        model_type, num_layers, share: of the whole model, the share 0 to 1; None where no file tells.
        num_adapter_tensors: tensors of an adapter on them, that are guarded too.
    """

    source: str
    layers: tuple[CoveredLayer, ...]
    num_tensors: int
    num_rows: int
    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]
    model_type: str | None = None
    num_layers: int | None = None
    share: float | None = None
    num_adapter_tensors: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Coverage:
        """The inverse of `asdict`, also through JSON. Raises KeyError or TypeError for anything else."""
        layers = tuple(
            CoveredLayer(layer["layer"], tuple((n, h, a) for n, h, a in layer["tensors"]), layer["num_parameters"])
            for layer in data["layers"]
        )
        return cls(**{**data, "layers": layers, "dtypes": tuple(data["dtypes"])})


def coverage_of(routes: Routes, source: str, *, num_adapter_tensors: int = 0) -> Coverage:
    """What routes cover; of the whole model as far as they know it.

    Args:
        routes: of a model, a checkpoint or a kept start.
        source: the file or folder that they come from.
        num_adapter_tensors: tensors of an adapter on them.
    """
    by_parameter = {route.parameter: route for route in routes}
    return Coverage(
        source=source,
        layers=tuple(_layer(layer, routes) for layer in sorted({route.layer for route in routes})),
        num_tensors=len(routes.parameters),
        num_rows=sum(_held_rows(routes, route) for route in by_parameter.values()),
        num_parameters=routes.num_parameters,
        num_bytes=routes.num_bytes,
        dtypes=tuple(sorted({route.dtype for route in routes})),
        model_type=routes.model_type or None,
        num_layers=len(routes.layer_kinds) or None,
        share=routes.share if routes.num_model_parameters else None,
        num_adapter_tensors=num_adapter_tensors,
    )


def _layer(layer: int, routes: Routes) -> CoveredLayer:
    chosen = routes.select(layers=[layer])
    tensors = {r.parameter: (canonical_name(r.parameter), _held_rows(chosen, r), r.shape[r.dim]) for r in chosen}
    return CoveredLayer(layer, tuple(tensors.values()), chosen.num_parameters)


def _held_rows(routes: Routes, route: Route) -> int:
    rows = routes.rows_of(route.parameter)
    return route.shape[route.dim] if rows is None else sum(stop - start for start, stop in rows)
