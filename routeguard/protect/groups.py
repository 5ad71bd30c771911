"""Parameter groups: routing in groups of its own, tagged, so that it can learn at another rate or be pulled back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from routeguard.protect.held import Held, held_parameters
from routeguard.protect.modes import LowLR
from routeguard.protect.optimizers import refuse_inexact_views, refuse_rate_free_optimizer
from routeguard.protect.row_views import RowViews
from routeguard.routes.collection import Routes
from routeguard.routes.find import find_routes
from routeguard.routes.wording import as_printed, first_of

TAG = "routeguard"  # the group key; its value is the mode's name


@dataclass(frozen=True)
class GroupPair:
    """Indices of a tagged group and of the group it is compared with (-1: none), and the ratio of their rates."""

    tagged: int
    sibling: int
    ratio: float


@dataclass
class RoutingGroups:
    """The tagged groups of one optimizer and what keeps them honest.

    Attributes:
        members: held parameter (or view of its rows) to the `Held` it belongs to and the row range (None: whole).
        pairs: each tagged group beside the group it was taken from (or the first one, if nothing else was in it).
    """

    optimizer: torch.optim.Optimizer
    tag: str
    members: dict[nn.Parameter, tuple[Held, tuple[int, int] | None]]
    pairs: list[GroupPair]
    views: list[RowViews] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        ratios = ", ".join(dict.fromkeys(f"{pair.ratio:g}" for pair in self.pairs if pair.sibling >= 0))
        rate = f"at {ratios} x the learning rate of the rest" if ratios else "the optimizer has no others"
        return f"{self.tag}: {self.describe_members()}, {rate}"

    _repr_pretty_ = as_printed

    def describe_members(self) -> str:
        """How many tensors are held, and where: "4 routing tensors in groups 1, 2 of AdamW"."""
        tensors = {held.name for held, _ in self.members.values()}
        groups = ", ".join(str(pair.tagged) for pair in self.pairs)
        return f"{len(tensors)} routing tensors in groups {groups} of {type(self.optimizer).__name__}"

    @property
    def tagged(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if group.get(TAG) == self.tag]

    def check(self) -> None:
        """Raise RuntimeError if a tag is gone or a rate no longer has its ratio to that of the sibling group."""
        groups = self.optimizer.param_groups
        for pair in self.pairs:
            if pair.tagged >= len(groups) or groups[pair.tagged].get(TAG) != self.tag:
                raise RuntimeError(
                    f"optimizer group {pair.tagged} lost its {self.tag!r} tag (a checkpoint or another callback "
                    "replaced the groups): routing is no longer protected"
                )
            if pair.sibling < 0:
                continue
            sibling, found = float(groups[pair.sibling]["lr"]), float(groups[pair.tagged]["lr"])
            if abs(found - sibling * pair.ratio) > 1e-6 * max(abs(sibling * pair.ratio), 1e-30):
                raise RuntimeError(
                    f"the routing group learns at {found:.3e}, not at {pair.ratio:.3g} x {sibling:.3e}: a scheduler or "
                    "callback sets group rates by itself. Use one that scales all groups alike (LambdaLR does)"
                )

    def reassert(self, scheduler: Any = None) -> None:
        """Write tags and starting rates again, after `load_state_dict` replaced the groups' and the scheduler's."""
        base_rates = getattr(scheduler, "base_lrs", None)
        for pair in self.pairs:
            group = self.optimizer.param_groups[pair.tagged]
            group[TAG] = self.tag
            if pair.sibling < 0:
                continue
            sibling = self.optimizer.param_groups[pair.sibling]
            for key in ("lr", "initial_lr"):
                if key in sibling:
                    group[key] = sibling[key] * pair.ratio
            if base_rates is not None:
                base_rates[pair.tagged] = base_rates[pair.sibling] * pair.ratio

    def follow(self, held: Sequence[Held]) -> None:
        """Go on with what has come to stand for the held parameters: under FSDP2, their shards in this process.

        Raises RuntimeError if the tagged groups hold anything else.
        """
        by_parameter = {id(h.whole): h for h in held}
        tensors = [p for group in self.tagged for p in group["params"]]
        unknown = [tuple(p.shape) for p in tensors if id(p) not in by_parameter]
        if unknown or not tensors:
            raise RuntimeError(
                f"the {self.tag!r} groups of the optimizer hold {len(unknown)} of {len(tensors)} tensors that are no "
                f"routing parameters of the model any more (shapes {unknown[:3]}): the engine has replaced them"
            )
        self.members = {p: (by_parameter[id(p)], None) for p in tensors}

    def arm(self, *, check: bool = True) -> None:
        """Check before each step, and hand row views their gradients; idempotent, and again after `remove`.

        `check=False` leaves the checking to the caller: ZeRO shows the optimizer one group at a time while it steps.
        """
        if self._hooks:
            return
        if check:
            self._hooks.append(self.optimizer.register_step_pre_hook(lambda *_: self.check()))
        for views in self.views:
            views.arm()
        if self.views:
            self._hooks.append(self.optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def _after_step(self) -> None:
        for views in self.views:
            views.after_step()

    def remove(self) -> None:
        """Remove every hook. The groups stay; with row views, call `arm` before the optimizer steps again."""
        for hook in self._hooks:
            hook.remove()
        for views in self.views:
            views.remove()
        self._hooks.clear()


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
    are dropped. A parameter held in part is replaced, in the optimizer only, by views of its rows.

    Raises:
        ValueError: no held parameter is trainable or known to the optimizer; the optimizer already has state; it sets
            its own step size; or it cannot treat views exactly (row ranges).
    """
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
        rate = max(float(group["lr"]), float(group.get("initial_lr", 0.0)))
        if rate * strength > 1:
            raise ValueError(
                f"{mode}: strength {strength:g} at a learning rate of {rate:g} pulls by more than the whole way in one "
                f"step; use a strength of at most {1 / rate:g}, or Freeze()"
            )


def _refuse_columns(partial: Sequence[Held], mode: str) -> None:
    columns = [h.name for h in partial if h.dim != 0]
    if columns:
        raise ValueError(
            f"{columns[0]} holds routing as columns (dim 1), whose views are not contiguous, so {mode} would not be "
            "exact there; use protect=Freeze()"
        )
