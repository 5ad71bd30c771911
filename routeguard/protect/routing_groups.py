"""The tagged parameter groups in which routing trains, and what keeps their tags and rates what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from routeguard.protect.held import Held
from routeguard.protect.row_views import RowViews
from routeguard.routes.wording import as_printed

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
