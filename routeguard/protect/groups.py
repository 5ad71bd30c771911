"""Parameter groups: routing in groups of its own, tagged, so that it can learn at another rate or be pulled back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from routeguard.protect.held import Held, held_parameters
from routeguard.protect.modes import L2SP, LowLR
from routeguard.protect.optimizers import inner_optimizer, refuse_inexact_views, refuse_rate_free_optimizer
from routeguard.protect.routing_groups import TAG, GroupPair, RoutingGroups
from routeguard.protect.row_views import RowViews
from routeguard.routes.collection import Routes
from routeguard.routes.find import find_routes
from routeguard.routes.wording import first_of

_ROUNDED = 1e-5  # by which the strength that a message names may be off


def split_groups(
    optimizer: torch.optim.Optimizer,
    held: Sequence[Held],
    *,
    tag: str,
    scale: float = 1.0,
    weight_decay: float | None = None,
) -> RoutingGroups:
    """Move held parameters of a fresh optimizer into tagged groups of their own.

    Each group that holds any is split: the rest stays where it was (the main group stays first), the held ones follow
    in a new group with the same options, `lr` times `scale` and, if given, another weight decay. Groups left empty
    are dropped. A parameter held in part is replaced, in the optimizer only, by views of its rows. Of an optimizer
    that accelerate has prepared, the one inside is split.

    Raises:
        ValueError: no held parameter is trainable or known to the optimizer; the optimizer already has state; it sets
            its own step size; or it cannot treat views exactly (row ranges).
    """
    optimizer = inner_optimizer(optimizer)
    mode = {"low_lr": "LowLR", "anchor": "Anchor"}.get(tag, tag)
    refuse_rate_free_optimizer(optimizer, mode)
    if optimizer.state:
        raise ValueError(
            "the optimizer already holds state (it has made steps, or is one like Adagrad that starts with state); "
            f"{mode} must split its groups before that"
        )
    movable = {id(h.parameter): h for h in held if h.trainable and not h.is_shared_factor}
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not movable.keys() & known:
        raise ValueError(
            f"{mode} found no trainable routing parameter in the optimizer ({len(held)} held, "
            f"{sum(h.trainable for h in held)} of them trainable): queries and keys cannot move. "
            "Use protect='track', or 'freeze'"
        )
    partial = [h for h in movable.values() if h.rows is not None]
    if partial:
        refuse_inexact_views(optimizer, [h.name for h in partial], mode)
        _refuse_columns(partial, mode)
    return _split(optimizer, movable, tag, scale, weight_decay)


def _split(
    optimizer: torch.optim.Optimizer, movable: dict[int, Held], tag: str, scale: float, weight_decay: float | None
) -> RoutingGroups:
    kept: list[dict[str, Any]] = []
    tagged: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    members: dict[nn.Parameter, tuple[Held, tuple[int, int] | None]] = {}
    views: list[RowViews] = []
    for group in optimizer.param_groups:
        rest: list[nn.Parameter] = []
        routing: list[nn.Parameter] = []
        for parameter in group["params"]:
            held = movable.get(id(parameter))
            if held is None:
                rest.append(parameter)
            elif held.rows is None:
                routing.append(parameter)
                members[parameter] = (held, None)
            else:
                rows = RowViews(held.name, parameter, held.rows)
                views.append(rows)
                rest += [view for _, view in rows.free]
                routing += [view for _, view in rows.held]
                members.update({view: (held, at) for at, view in rows.held})
        group["params"] = rest
        if rest:
            kept.append(group)
        if routing:
            new = {**group, "params": routing, "lr": group["lr"] * scale, TAG: tag}
            if "initial_lr" in group:
                new["initial_lr"] = group["initial_lr"] * scale
            if weight_decay is not None and "weight_decay" in group:
                new["weight_decay"] = weight_decay
            tagged.append((new, group if rest else None))
    optimizer.param_groups[:] = kept + [new for new, _ in tagged]
    fallback = 0 if kept else -1
    at = {id(group): index for index, group in enumerate(optimizer.param_groups)}
    pairs = [_pair(optimizer, at[id(new)], at[id(old)] if old is not None else fallback) for new, old in tagged]
    groups = RoutingGroups(optimizer, tag, members, pairs, views)
    groups.arm()
    return groups


def _pair(optimizer: torch.optim.Optimizer, tagged: int, sibling: int) -> GroupPair:
    rates = [float(optimizer.param_groups[index]["lr"]) for index in (tagged, sibling)]
    return GroupPair(tagged, sibling, rates[0] / rates[1] if sibling >= 0 and rates[1] else 1.0)


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    routing_lr: float | None = None,
    routing_scale: float | None = None,
    weight_decay: float = 0.0,
    layers: Iterable[int] | None = None,
    norms: bool = False,
    decay: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for a hand-written loop: routing at its own learning rate, everything else at `lr`.

    Every trainable parameter is in exactly one group; the main group is first; empty groups are left out.

    Args:
        model: any model that `find_routes` reads, on its final device and in its final dtype.
        lr: learning rate of everything that is not routing.
        routing_lr, routing_scale: the routing rate, or its ratio to `lr`; give exactly one.
        weight_decay: for matrices; biases, norms and embeddings of one dimension get 0.
        layers, norms: as for `find_routes`.
        decay: decides by name and parameter whether weight decay applies. Default: parameters of two or more
            dimensions.

    Returns:
        Groups for a torch optimizer. Routing groups carry the key "routeguard": "low_lr".

    Raises:
        ValueError: both or neither rate given, a rate that is not positive, nothing to protect, or a tensor that holds
            routing rows beside others (give such a model's optimizer to `low_lr`, or use `freeze`).
    """
    if (routing_lr is None) == (routing_scale is None):
        raise ValueError("give exactly one of routing_lr and routing_scale")
    rate = routing_lr if routing_lr is not None else lr * float(routing_scale or 0.0)
    if not (rate > 0 and lr > 0):
        raise ValueError(
            f"learning rates must be positive (lr={lr}, routing {rate}); to hold routing still use "
            "freeze(model, routes)"
        )
    held = [h for h in held_parameters(model, find_routes(model, layers=layers, norms=norms)) if h.trainable]
    partial = [h.name for h in held if h.rows is not None]
    if partial:
        raise ValueError(
            f"{first_of(partial)} holds routing rows beside other rows, which a parameter group "
            "cannot express; make the optimizer first and call routeguard.low_lr(optimizer, model, routes, "
            "scale=...), or use routeguard.freeze(model, routes)"
        )
    if not held:
        raise ValueError("no routing parameter is trainable: queries and keys cannot move, so plain groups will do")
    routing = {id(h.parameter) for h in held}
    decays = decay or (lambda _, parameter: parameter.ndim >= 2)
    buckets: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            buckets.setdefault((id(parameter) in routing, not decays(name, parameter)), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": rate if is_routing else lr,
            "weight_decay": 0.0 if undecayed else weight_decay,
            **({TAG: LowLR.name} if is_routing else {}),
        }
        for (is_routing, undecayed), parameters in sorted(buckets.items())
    ]


def low_lr(optimizer: torch.optim.Optimizer, model: nn.Module, routes: Routes, *, scale: float = 0.1) -> RoutingGroups:
    """`LowLR` for a plain loop: split a fresh optimizer so that routing learns at `scale` times the rate."""
    return split_groups(optimizer, held_parameters(model, routes), tag=LowLR.name, scale=LowLR(scale).scale)


def check_pull_rate(groups: Iterable[Mapping[str, Any]], mode: str, strength: float) -> None:
    """Raise ValueError where a pull would overshoot the start (`lr * strength` above 1), now or after a warm-up."""
    for group in groups:
        pull_share(max(float(group["lr"]), float(group.get("initial_lr", 0.0))), mode, strength)


def pull_share(rate: float, mode: str, strength: float) -> float:
    """How far a pull goes at a learning rate, as a share of the way to the start.

    Raises ValueError where it would go further than the start, as under a schedule that raises the rate.
    """
    share = rate * strength
    if share > 1 + _ROUNDED:
        remedy = (
            f"its total is {share:.3g} times too large for that: ask for less, or train for more steps"
            if mode == L2SP.__name__
            else f"use a strength of at most {1 / rate:g} (where the rate goes no higher), or Freeze()"
        )
        raise ValueError(
            f"{mode}: strength {strength:g} at a learning rate of {rate:g} pulls by more than the whole way in one "
            f"step; {remedy}"
        )
    return share


def _refuse_columns(partial: Sequence[Held], mode: str) -> None:
    columns = [h.name for h in partial if h.dim != 0]
    if columns:
        raise ValueError(
            f"{columns[0]} holds routing as columns (dim 1), whose views are not contiguous, so {mode} would not be "
            "exact there; use protect=Freeze()"
        )
