"""From routes to the parameters of a concrete model that training could move.

In full fine-tuning those are the routed parameters themselves. Under PEFT the base is frozen and what moves is the
adapter on it: LoRA's A and B (rows of a route are rows of B), DoRA's magnitude, or another method's tensors as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from routeguard.protect.adapter_inits import ZERO_B_INITS
from routeguard.protect.rows import take_rows
from routeguard.routes.collection import Route, Routes, Rows, count_rows, merge_rows
from routeguard.routes.in_memory import copied_for, is_quantised
from routeguard.routes.names import canonical_name, without_late_wrappers
from routeguard.sharding.whole import whole_tensor

Part = Literal["base", "lora_A", "lora_B", "magnitude", "adapter"]

_BASE_LAYER = ".base_layer."  # between the name of a PEFT layer and what it wraps
_CONSTANT = "ranknum."  # AdaLoRA's rank as a number, which no adapter file has
_PARTS: dict[str, Part] = {"lora_A": "lora_A", "lora_B": "lora_B", "lora_magnitude_vector": "magnitude"}
_FACTOR = re.compile(r"\.(?:lora_A|lora_B|lora_magnitude_vector)\.(?P<adapter>[^.]+)")


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter (or some of its rows) through which training could move a route.

    Attributes:
        name: name in `named_parameters()`, without wrappers that an engine put around inner modules.
        parameter: the parameter itself.
        rows: ranges along `dim`, or None for the whole parameter.
        part: what it is: the routed parameter itself ("base") or a piece of an adapter on it.
        routes: the routes that it carries.
    """

    name: str
    parameter: nn.Parameter
    rows: Rows | None
    dim: int
    part: Part
    routes: tuple[Route, ...]

    @property
    def canonical(self) -> str:
        return canonical_name(self.name)

    @property
    def adapter(self) -> str:
        """The name of the adapter that it is a piece of; "" for a base parameter."""
        if self.part == "base":
            return ""
        layer = without_late_wrappers(self.routes[0].parameter).partition(_BASE_LAYER)[0]
        return self.name.removeprefix(f"{layer}.").split(".")[1]

    @property
    def is_shared_factor(self) -> bool:
        """LoRA's A where only some of the rows it feeds are routing: it serves the others too, and stays free."""
        return self.part == "lora_A" and any(route.rows is not None for route in self.routes)

    @property
    def trainable(self) -> bool:
        return self.whole.requires_grad

    @property
    def num_elements(self) -> int:
        if self.rows is None or not self.parameter.numel():
            return self.parameter.numel()
        return self.parameter.numel() // self.parameter.shape[self.dim] * count_rows(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.parameter.element_size()

    @property
    def whole(self) -> nn.Parameter:
        """The parameter in the model, of which a shard is only this process' part."""
        return self.parameter

    @property
    def gradient_rows(self) -> tuple[Rows | None, int]:
        """The held rows, and their dimension, in the gradient that this process sees."""
        return self.rows, self.dim

    @property
    def share(self) -> float:
        """What a sum over all processes counts of this process' entries: 1, or less where others have them too."""
        return 1.0


@dataclass(frozen=True, eq=False)
class LoraPair:
    """The factors of one LoRA adapter on a routed weight: ΔW = scale · B · A, rows of B being rows of W.

    `magnitude` is DoRA's vector, one number for each row of W, or None. `bias` is B's own (`lora_bias=True`), whose
    `scale · bias` is added to the output, or None.
    """

    routes: tuple[Route, ...]
    rows: Rows | None
    a: nn.Parameter
    b: nn.Parameter
    scale: float
    base_layer: Any  # nn.Linear or what stands for it (Conv1D, a quantised linear)
    magnitude: nn.Parameter | None = None
    bias: nn.Parameter | None = None


def held_parameters(model: nn.Module, routes: Routes) -> list[Held]:
    """Every parameter through which training could move the routes, each once, base parameters first.

    Base parameters that an adapter wraps are listed only if they are trainable themselves. Of the whole copies that
    several adapters have of a module (`modules_to_save`), the active adapter's is the parameter. Raises ValueError when
    rows of a tensor would have to be held inside an adapter that mixes rows (anything but LoRA), or another adapter's
    copy is trainable too.
    """
    names = {without_late_wrappers(name): name for name, _ in model.named_parameters()}
    parameters = {without_late_wrappers(name): parameter for name, parameter in model.named_parameters()}
    copies = trainable_copies(model, routes)
    if copies:
        raise ValueError(
            f"{copies[0]} is trainable, and the adapter that it is for is not active: of several copies of a routed "
            "module only the active adapter's can be guarded. Make the adapter that is to be trained the active one "
            "(model.set_adapter(name)), and freeze the copies of the others (requires_grad_(False))"
        )
    held: list[Held] = []
    for routed, members in _by_parameter(routes).items():
        name = without_late_wrappers(routed)
        if name not in parameters:
            raise ValueError(
                f"the routes name {routed}, which this model does not have (it was wrapped, compiled or given adapters "
                "since they were found, or they are another model's): call find_routes on this very model"
            )
        parameter = parameters[name]
        rows = routes.rows_of(routed)
        layer = peft_layer(model, names[name])
        if layer is None or parameter.requires_grad:
            held.append(Held(name, parameter, rows, members[0].dim, "base", members))
        if layer is not None:
            held += _adapter_parameters(name.partition(_BASE_LAYER)[0], layer, rows, members, parameters)
    return held


def without_idle_adapters(model: nn.Module, held: Sequence[Held]) -> tuple[list[Held], list[str]]:
    """Held parameters without the pieces of adapters that are not active, and the names of these adapters."""
    kept, idle = [], set()
    for piece in held:
        if piece.part == "base" or piece.adapter in peft_layer(model, piece.routes[0].parameter).active_adapters:
            kept.append(piece)
        else:
            idle.add(piece.adapter)
    return kept, sorted(idle)


def lora_pairs(model: nn.Module, routes: Routes) -> list[LoraPair]:
    """The LoRA factors on routed weights, for measuring and pulling ΔW without forming it."""
    pairs = []
    for name, members in _by_parameter(routes).items():
        layer = peft_layer(model, name)
        if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) or not name.endswith("weight"):
            continue
        for adapter in layer.lora_A:
            pairs.append(
                LoraPair(
                    routes=members,
                    rows=routes.rows_of(name),
                    a=layer.lora_A[adapter].weight,
                    b=layer.lora_B[adapter].weight,
                    scale=float(layer.scaling[adapter]),
                    base_layer=layer.get_base_layer(),
                    magnitude=_magnitude(layer, adapter),
                    bias=layer.lora_B[adapter].bias,
                )
            )
    return pairs


def _magnitude(layer: Any, adapter: str) -> nn.Parameter | None:
    vectors = getattr(layer, "lora_magnitude_vector", None)
    return vectors[adapter].weight if vectors is not None and adapter in vectors else None


def trained_adapters(held: Sequence[Held]) -> list[str]:
    """Names of held B factors with a non-zero entry in their held rows: the adapter has been trained, or starts so.

    Reads values, so it waits for the device.
    """
    return [
        h.name
        for h in held
        if h.part == "lora_B"
        and not h.parameter.is_meta
        and bool(take_rows(whole_tensor(h.parameter), h.rows, h.dim).any())
    ]


def adapter_of(name: str) -> str:
    """The adapter's name inside that of one of its LoRA or DoRA tensors: "….lora_B.default.weight" → "default"."""
    match = _FACTOR.search(name)
    assert match is not None
    return match["adapter"]


def starts_at_zero(model: nn.Module, adapter: str) -> bool:
    """Whether a fresh adapter of this configuration has B at zero (PiSSA, OLoRA, LoftQ … do not)."""
    config = peft_configs(model).get(adapter)
    return config is None or getattr(config, "init_lora_weights", True) in ZERO_B_INITS


def peft_configs(model: nn.Module) -> dict[str, Any]:
    """Adapter name to PEFT config, empty for a model without adapters."""
    for module in (model, getattr(model, "module", None), getattr(model, "_orig_mod", None)):
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict):
            return configs
    return {}


def quantised_routes(model: nn.Module, routes: Routes) -> list[str]:
    """Names of routed parameters that are stored quantised."""
    parameters = dict(model.named_parameters())
    return [name for name in routes.parameters if is_quantised(parameters[name])]


def trainable_copies(model: nn.Module, routes: Routes) -> list[str]:
    """Trainable whole copies (`modules_to_save`) that adapters which are not active have of routed parameters."""
    active = {without_late_wrappers(name) for name in routes.parameters}
    routed = {canonical_name(name) for name in active}
    copies = [name for name, parameter in model.named_parameters() if parameter.requires_grad and copied_for(name)]
    return [name for name in copies if canonical_name(name) in routed and without_late_wrappers(name) not in active]


def _by_parameter(routes: Routes) -> dict[str, tuple[Route, ...]]:
    members: dict[str, list[Route]] = {}
    for route in routes:
        members.setdefault(route.parameter, []).append(route)
    return {name: tuple(group) for name, group in members.items()}


def peft_layer(model: nn.Module, parameter: str) -> Any:
    """The PEFT layer around a base parameter, or None."""
    owner, marker, _ = parameter.partition(_BASE_LAYER)
    return model.get_submodule(owner) if marker else None


def _adapter_parameters(
    owner: str, layer: nn.Module, rows: Rows | None, members: tuple[Route, ...], parameters: dict[str, nn.Parameter]
) -> list[Held]:
    held = []
    weight_routes = members[0].kind != "bias"
    for local, _ in layer.named_parameters():
        if _BASE_LAYER in f".{local}" or local.startswith(_CONSTANT):
            continue
        parameter = parameters.get(f"{owner}.{local}")
        if parameter is None or not weight_routes:
            continue  # a bias of the base layer has no adapter of its own
        # AdaLoRA's A and B, bare parameters with singular values between them, are no factors that stand alone.
        is_factor = local.endswith((".weight", ".bias"))
        part = _PARTS.get(local.split(".")[0], "adapter") if is_factor else "adapter"
        if part == "adapter" and rows is not None:
            raise ValueError(
                f"{owner} holds routing rows {merge_rows(rows)[:2]} beside other rows, and its adapter "
                f"({local.split('.')[0]}) mixes rows; use LoRA there, or leave this module without an adapter"
            )
        held.append(Held(f"{owner}.{local}", parameter, None if part == "lora_A" else rows, 0, part, members))
    return held
