"""What a reader of routes should know: what is not covered and why, and how sure the answer is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from routeguard.routes.architecture import Architecture
from routeguard.routes.collection import ROUTING_ROLES, Route, Routes
from routeguard.routes.config import NUM_HEADS, Config, first
from routeguard.routes.layer_kinds import LONG_RANGE
from routeguard.routes.table import architecture_of


def notes_on(
    text: Config,
    architecture: Architecture,
    known: bool,
    kinds: tuple[str, ...],
    routes: Iterable[Route],
    kept: Iterable[Route],
) -> tuple[str, ...]:
    """Notes for the summary: `routes` is everything found, `kept` what the caller asked for."""
    kept = set(kept)
    left = [route for route in routes if route not in kept and route.role in ROUTING_ROLES]
    notes = [architecture.note] if architecture.note else []
    if architecture.beside:
        notes.append(f"every layer has {architecture.beside} beside its attention: a hybrid, all layers of it covered")
    shared = sorted({_short(route) for route in left if route.shared and route.kind != "norm"})
    if shared:
        notes.append(f"rows that also feed the values are not covered: {', '.join(shared)} (ask with shared=True)")
    norms = sorted({_short(route) for route in left if route.kind == "norm"})
    if norms:
        notes.append(
            f"norms and other vectors that shape the logits are not covered: {', '.join(norms)} (ask with norms=True)"
        )
    if any(route.sparse for route in routes):
        notes.append(
            "sparse layers attend globally to what a top-k indexer or a compression keeps; the indexer is left out, "
            "it gets no gradient from the language-model loss"
        )
    if set(kinds) <= set(LONG_RANGE) and not architecture.beside:
        notes.append("every layer is full attention: the published effect of restoring Q/K is weak in such models")
    if first(text, NUM_HEADS) is None:
        notes.append("the config names no head count; it was taken from the shapes")
    if not known:
        notes.append(
            f"model type {text.get('model_type')!r} is not in the table: the rows were read from the tensors' names "
            "and shapes and are unverified; check them with routeguard.verify(model)"
        )
    return tuple(notes)


def warn_if_pure_softmax(routes: Routes) -> None:
    """Warn when all layers are full attention, with nothing beside it."""
    if routes.all_layers_full and not architecture_of(routes.model_type)[0].beside:
        warnings.warn(
            f"all {len(routes.layer_kinds)} layers of {routes.model_type!r} are full attention; routeguard is made for "
            "hybrids, and in pure softmax models the published effect of protecting Q/K is weak. Narrow it with "
            "layers=... if you can",
            UserWarning,
            stacklevel=3,
        )


def _short(route: Route) -> str:
    """The last two segments of the name, without the index of an adapter."""
    parts = [part for part in route.parameter.split(".") if not part.isdigit()]
    return ".".join(parts[-2:])
