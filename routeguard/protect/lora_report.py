"""What LoRA adapters reach and what they leave, in lines that both reports share."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from routeguard.protect.lora_modules import KIND_NAMES, REASONS, LinearModule, expert_tensors, locate_decoder
from routeguard.routes.collection import Routes
from routeguard.routes.find import find_routes
from routeguard.routes.names import canonical_name


def places(modules: Iterable[LinearModule]) -> str:
    """Names and layers of modules, in words."""
    return summarise((module.inner, module.layer) for module in modules)


def summarise(names: Iterable[tuple[str, int | None]]) -> str:
    """`v_proj, o_proj (8 layers)` from names inside a layer and their layers; numbered parts are folded into `*`."""
    by_name: dict[str, set[int | None]] = {}
    for inner, layer in names:
        short = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", inner)
        by_name.setdefault(short, set()).add(layer)
    by_count: dict[int, list[str]] = {}
    for short, layers in by_name.items():
        by_count.setdefault(len(layers - {None}), []).append(short)
    parts = []
    for count, shorts in by_count.items():
        listed = ", ".join(shorts[:6]) + (f" and {len(shorts) - 6} more" if len(shorts) > 6 else "")
        parts.append(f"{listed} ({count} layer{'s' if count != 1 else ''})" if count else listed)
    return "; ".join(parts)


def coverage_lines(adapted: Iterable[LinearModule], missing: Iterable[LinearModule]) -> list[str]:
    """One line a kind: the adapted names, and in how many of the layers of that kind they are."""
    adapted, missing = list(adapted), list(missing)
    lines = []
    for kind, label in KIND_NAMES.items():
        there = [m for m in adapted if m.kind == kind]
        layers = {m.layer for m in (*there, *(m for m in missing if m.kind == kind and m.layer is not None))}
        if not layers:
            continue
        reached = len({m.layer for m in there})
        text = summarise((m.inner, None) for m in there) or "no adapter"
        lines.append(
            f"  {label}: {text}: {reached} of {len(layers)} layers" if layers != {None} else f"  {label}: {text}"
        )
    return lines


def left_out_lines(modules: Iterable[LinearModule]) -> list[str]:
    """One line a reason: what is left out, with row counts for tensors that are only partly routing."""
    by_reason: dict[str, list[LinearModule]] = {}
    for module in modules:
        by_reason.setdefault(module.left_out or "kinds", []).append(module)
    lines = []
    for reason, group in by_reason.items():
        if reason == "fused":
            names = [(f"{m.inner} [{m.num_routing_rows} of {m.num_rows} rows]", m.layer) for m in group]
        else:
            names = [(m.inner, m.layer) for m in group]
        lines.append(f"{summarise(names)}: {REASONS[reason]}")
    return lines


def target_notes(
    model: nn.Module,
    routes: Routes,
    adapted: Sequence[LinearModule],
    *,
    shared: bool = False,
    reached: Iterable[str] = (),
) -> tuple[str, ...]:
    """What these adapters can still move, what they do not reach, and when merging them would be wrong.

    Args:
        model, routes: the model (wrapped or not) and its routes.
        adapted: linear modules with an adapter.
        shared: rows that feed keys and values alike were held too.
        reached: canonical names of parameters adapted through `target_parameters`.
    """
    notes = [
        _halves_note([m for m in adapted if m.num_routing_rows]),
        None if shared else _shared_note(model, adapted),
        _experts_note(model, routes, set(reached)),
        _tied_note(model, adapted),
    ]
    return tuple(note for note in notes if note is not None)


def quiet_routes(model: nn.Module, *, layers: Iterable[int] | None = None, shared: bool = False) -> Routes:
    """`find_routes` without its warning about pure softmax models (given once already)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return find_routes(model, layers=layers, shared=shared)


def _halves_note(halves: Sequence[LinearModule]) -> str | None:
    if not halves:
        return None
    return (
        f"{places(halves)}: hold query or key rows and are adapted whole; combine with RouteGuard(protect=Freeze()), "
        "which masks those rows of lora_B"
    )


def _shared_note(model: nn.Module, adapted: Iterable[LinearModule]) -> str | None:
    owners = {canonical_name(r.parameter).rpartition(".")[0] for r in quiet_routes(model, shared=True) if r.shared}
    both = [m for m in adapted if canonical_name(m.name) in owners]
    if not both:
        return None
    return (
        f"{places(both)}: feed keys and values alike and are adapted; keys can move through them (shared=True leaves "
        "them out)"
    )


def _experts_note(model: nn.Module, routes: Routes, reached: set[str]) -> str | None:
    decoder = locate_decoder(routes)
    left = [(inner, canonical_name(name)) for name, inner in expert_tensors(model, routes)]
    missed = [(inner, decoder.locate(name)[0]) for inner, name in left if name not in reached]
    return f"3-D expert tensors are no modules: {summarise(missed)}; target_parameters reaches them" if missed else None


def _tied_note(model: nn.Module, adapted: Iterable[LinearModule]) -> str | None:
    parameters = {canonical_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    weights = (parameters.get(f"{canonical_name(m.name)}.weight") for m in adapted)
    uses = Counter(id(weight) for weight in weights if weight is not None)
    num_tied = sum(count > 1 for count in uses.values())
    if num_tied == 0:
        return None
    return (
        f"{num_tied} weights are tied across layers, and each use gets its own adapter: keep the adapters unmerged "
        "(merging adds all of them to the one weight)"
    )
