"""What a guard does to a model and its optimizer before training: find the routes, freeze them, or split the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from routeguard.protect.anchor import anchored
from routeguard.protect.freeze import Frozen, freeze
from routeguard.protect.groups import split_groups
from routeguard.protect.held import Held, held_parameters, quantised_routes
from routeguard.protect.l2_sp import refuse_unpulled
from routeguard.protect.lora_modules import has_adapters
from routeguard.protect.modes import L2SP, Anchor, Freeze, LowLR, Protection
from routeguard.protect.optimizers import inner_optimizer
from routeguard.protect.routing_groups import RoutingGroups
from routeguard.routes.collection import Role, Routes
from routeguard.routes.find import find_routes
from routeguard.routes.names import without_late_wrappers
from routeguard.routes.wording import first_of
from routeguard.training.four_bit import StaysUnpacked

if TYPE_CHECKING:
    from torch import nn

_REMEDY = "Make the Trainer after that, or let the guard look again: guard.detach(), then guard.attach(trainer)"


class Protector:
    """Holds one protection over one model at a time; a model that `model_init` makes anew replaces the last one.

    Attributes:
        model: the model that is protected, None before the first.
        routes: its routes, None before the first.
        frozen: what is frozen, in mode `Freeze`.
        groups: the optimizer's tagged groups, in modes `LowLR` and `Anchor`, once there is an optimizer.
    """

    def __init__(
        self, protect: Protection, *, layers: tuple[int, ...] | None, roles: tuple[Role, ...], norms: bool
    ) -> None:
        self.protect = protect
        self.layers = layers
        self.roles = roles
        self.norms = norms
        self.model: nn.Module | None = None
        self.routes: Routes | None = None
        self.frozen: Frozen | None = None
        self.groups: RoutingGroups | None = None
        self._known: set[str] = set()  # names of what could move the routes when the model was held
        self._pulled: set[str] = set()
        self._unpacked: StaysUnpacked | None = None

    def find(self, model: nn.Module) -> list[Held]:
        """Everything through which training could move the routes of a model; changes nothing."""
        return held_parameters(model, self._routes_of(model))

    def _routes_of(self, model: nn.Module) -> Routes:
        return find_routes(model, layers=self.layers, roles=self.roles, norms=self.norms)

    def hold(self, model: nn.Module) -> None:
        """Find a model's routes, and freeze them if that is the mode.

        Raises ValueError when there is nothing to hold, or nothing that the mode could act on.
        """
        routes = self._routes_of(model)
        if not routes:
            raise ValueError(
                f"no routing rows to hold in {routes.model_type!r} with roles {self.roles}: "
                "only rows shared with the values exist"
            )
        held = held_parameters(model, routes)
        _refuse_quantised_full_fine_tuning(model, routes, held)
        if isinstance(self.protect, (LowLR, Anchor)) and not any(h.trainable for h in held):
            raise ValueError(
                f"{self.protect.name} found {len(held)} routing tensors, none of them trainable (an adapter elsewhere, "
                "or frozen by hand): queries and keys cannot move. Use protect='track' to log their drift, or 'freeze'"
            )
        if isinstance(self.protect, L2SP):
            refuse_unpulled(model)
        if isinstance(self.protect, Freeze):
            _refuse_freezing_everything(model, held)
        if self.frozen is not None:
            self.frozen.detach()
        self.frozen = freeze(model, routes) if isinstance(self.protect, Freeze) else None
        self.routes = routes
        self.model = model
        self._known = {h.name for h in held}
        self._let_pack()
        self._unpacked = StaysUnpacked(model)
        # Decided here, at the weights the run starts from: a resumed adapter is no longer at zero later on.
        self._pulled = {h.name for h in anchored(held)} if isinstance(self.protect, Anchor) else set()

    def split(self, optimizer: Any) -> None:
        """Give routing its tagged groups, once for each optimizer; nothing to do in the modes without groups."""
        if not isinstance(self.protect, (LowLR, Anchor)):
            return
        assert self.model is not None and self.routes is not None
        inner = inner_optimizer(optimizer)
        if self.groups is not None and self.groups.optimizer is inner:
            return
        held = held_parameters(self.model, self.routes)
        if isinstance(self.protect, Anchor):
            pulled = [h for h in held if h.name in self._pulled]
            self.groups = split_groups(inner, pulled, tag=Anchor.name, weight_decay=0.0)
        else:
            self.groups = split_groups(inner, held, tag=LowLR.name, scale=self.protect.scale)

    def refuse_changes(self) -> None:
        """Raise ValueError when the model is no longer what was held.

        Its routing parameters are gone, others that are not held move the routes, or frozen ones are trainable again
        (PEFT may do that, which is undone).
        """
        self._refuse_late_layers()
        if self.frozen is None:
            return
        self.frozen.freeze_again()
        for held in (*self.frozen.whole, *self.frozen.before):
            if held.trainable:
                raise ValueError(f"{held.name} was frozen and is trainable again: something unfroze it before train()")

    def _refuse_late_layers(self) -> None:
        assert self.model is not None and self.routes is not None
        present = {without_late_wrappers(name) for name, _ in self.model.named_parameters()}
        gone = [name for name in self.routes.parameters if without_late_wrappers(name) not in present]
        if gone:
            raise ValueError(
                f"{first_of(gone, 'routing tensors')} is not in the model any more: layers were compiled, wrapped or "
                f"given adapters after the Trainer was made. {_REMEDY}"
            )
        if not isinstance(self.protect, (Freeze, Anchor)):
            return  # the others look for what trains when training begins
        late = [h.name for h in held_parameters(self.model, self.routes) if h.trainable and h.name not in self._known]
        if late:
            raise ValueError(
                f"{first_of(late)} would move queries and keys and is not held by {self.protect.name}: it was added "
                f"or made trainable after the Trainer was made. {_REMEDY}"
            )

    def release(self) -> None:
        """Thaw what was frozen and forget the model."""
        if self.frozen is not None:
            self.frozen.release()
        self._let_pack()
        self.model = self.routes = self.frozen = self.groups = None

    def _let_pack(self) -> None:
        if self._unpacked is not None:
            self._unpacked.release()
            self._unpacked = None


def _refuse_freezing_everything(model: nn.Module, held: list[Held]) -> None:
    whole = {h.parameter for h in held if h.rows is None and not h.is_shared_factor}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained and whole.issuperset(trained):
        names = first_of([h.name for h in held if h.trainable])
        raise ValueError(
            f"freeze would leave nothing to train: all {len(trained)} trainable tensors move queries and keys "
            f"({names}). Let the adapter reach other modules (routeguard.lora_config(model) chooses them), or "
            "let queries and keys learn: protect='low_lr', 'anchor' or 'track'"
        )


def _refuse_quantised_full_fine_tuning(model: nn.Module, routes: Routes, held: list[Held]) -> None:
    names = quantised_routes(model, routes)
    if names and not any(h.part != "base" for h in held) and not has_adapters(model):
        refuse_quantised_without_adapter(names)


def refuse_quantised_without_adapter(names: Sequence[str]) -> None:
    """Raise ValueError: these routing tensors are quantised, and nothing else of the model is trained."""
    raise ValueError(
        f"{first_of(names, 'routing tensors')} is stored quantised and there is no adapter: full "
        "fine-tuning cannot train or protect quantised weights. Add a LoRA adapter, or load the model unquantised"
    )
