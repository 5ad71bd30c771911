"""After wrapping with PEFT: prove that no adapter moves full-attention queries and keys, and say what is covered."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from routeguard.protect.held import trainable_copies
from routeguard.protect.lora_modules import (
    LinearModule,
    base_layer,
    is_adapter,
    linear_modules,
    locate_decoder,
    top_level_modules,
)
from routeguard.protect.lora_report import coverage_lines, left_out_lines, quiet_routes, summarise, target_notes
from routeguard.routes.collection import Routes
from routeguard.routes.names import canonical_name
from routeguard.routes.wording import as_printed

Fused = Literal["exclude", "include"]
FUSED = ("exclude", "include")
FEW_LAYERS = 0.5  # a smaller share of the decoder's layers than this draws a warning


@dataclass(frozen=True)
class LoraCoverage:
    """What the adapters of a PEFT model reach.

    Attributes:
        adapted: linear modules with an adapter; `left_out` is a key of `REASONS` where something speaks against it.
        missing: linear modules without one, `left_out` likewise.
        expert_tensors: adapted parameters that are no linear modules (`target_parameters`).
        num_layers: decoder layers of the model.
        num_adapter_parameters: trainable parameters of the model.
        notes: what the adapters can still move, and what they do not reach.
    """

    adapted: tuple[LinearModule, ...]
    missing: tuple[LinearModule, ...]
    expert_tensors: tuple[str, ...]
    num_layers: int
    num_adapter_parameters: int
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers that hold at least one adapted linear module."""
        return tuple(sorted({m.layer for m in self.adapted if m.layer is not None}))

    def __str__(self) -> str:
        lines = [
            f"LoRA coverage: {len(self.adapted)} of {len(self.adapted) + len(self.missing)} linear modules in "
            f"{len(self.layers)} of {self.num_layers} layers, {self.num_adapter_parameters:,} trainable parameters",
            *coverage_lines(self.adapted, self.missing),
        ]
        if self.expert_tensors:
            number, first = len(self.expert_tensors), self.expert_tensors[0]
            lines.append(f"  through target_parameters: {number} tensors, first {first}")
        lines += [f"  not covered: {line}" for line in left_out_lines(m for m in self.missing if m.left_out)]
        free = [(m.inner, m.layer) for m in self.missing if m.left_out is None]
        if free:
            lines.append(f"  not covered: {summarise(free)}: not among the targets")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    _repr_pretty_ = as_printed


def check_lora_coverage(
    peft_model: nn.Module,
    *,
    layers: Iterable[int] | None = None,
    fused: Fused = "exclude",
    shared: bool = False,
    quiet: bool = False,
) -> LoraCoverage:
    """Verify that nothing trains the queries and keys of full attention, and print coverage by kind of layer.

    Args:
        peft_model: a model after `get_peft_model`, however its targets were chosen.
        layers, shared: as given to `lora_config`.
        fused: "exclude" (default) refuses an adapter on a tensor that is only partly query or key rows; "include"
            accepts it with a note.
        quiet: do not print the report.

    Raises:
        ValueError: an adapter (or a full copy) sits on queries or keys, nothing is adapted, or no full attention.

    Warns:
        UserWarning: the adapters reach fewer than half of the decoder's layers (a default target list on a hybrid).
    """
    if fused not in FUSED:
        raise ValueError(f"fused={fused!r} not understood; choose 'exclude' or 'include'")
    layers = None if layers is None else list(layers)
    coverage = lora_coverage(peft_model, layers=layers, shared=shared)
    held = quiet_routes(peft_model, layers=layers, shared=shared)
    _refuse_trained_routes(peft_model, held, coverage.adapted, fused)
    few = few_layers(peft_model, coverage)
    if few is not None:
        warnings.warn(few, UserWarning, stacklevel=2)
    if not quiet:
        print(coverage)
    return coverage


def lora_coverage(peft_model: nn.Module, *, layers: Iterable[int] | None = None, shared: bool = False) -> LoraCoverage:
    """What the adapters of a PEFT model reach, queries and keys or not. Arguments as for `check_lora_coverage`.

    Raises ValueError where nothing is adapted.
    """
    layers = None if layers is None else list(layers)
    routes = quiet_routes(peft_model, shared=shared)
    held = quiet_routes(peft_model, layers=layers, shared=shared)
    modules = linear_modules(peft_model, routes, layers=None if layers is None else held.layers)
    adapters = _adapters(peft_model)
    wrapped_parameters = _wrapped_parameters(peft_model, adapters)
    adapted = tuple(m for m in modules if m.name in adapters)
    if not adapted and not wrapped_parameters:
        raise ValueError(
            f"no adapter found in {type(peft_model).__name__}: wrap it with get_peft_model(model, lora_config(model)) "
            "first (prompt and prefix tuning bypass the weights and are not covered)"
        )
    return LoraCoverage(
        adapted=adapted,
        missing=tuple(m for m in modules if m.name not in adapters),
        expert_tensors=tuple(wrapped_parameters.values()),
        num_layers=len(routes.layer_kinds),
        num_adapter_parameters=sum(p.numel() for p in peft_model.parameters() if p.requires_grad),
        notes=target_notes(peft_model, routes, adapted, shared=shared, reached=wrapped_parameters.values()),
    )


def few_layers(peft_model: nn.Module, coverage: LoraCoverage) -> str | None:
    """What to say where the adapters reach fewer than half of the decoder's layers; None where they reach more."""
    routes = quiet_routes(peft_model)
    decoder = locate_decoder(routes)
    reached = {*coverage.layers, *(decoder.locate(name)[0] for name in coverage.expert_tensors)} - {None}
    if len(reached) >= FEW_LAYERS * coverage.num_layers:
        return None
    return (
        f"the adapters reach {len(reached)} of {coverage.num_layers} layers of {routes.model_type!r} "
        f"({summarise((m.inner, None) for m in coverage.adapted)}); a default target list often misses the other "
        "kinds of layers of a hybrid. lora_config(model) reaches all of them"
    )


def _adapters(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in top_level_modules(dict(model.named_modules())) if is_adapter(m)}


def _wrapped_parameters(model: nn.Module, adapters: dict[str, nn.Module]) -> dict[int, str]:
    """Parameters adapted through `target_parameters`: identity to canonical name."""
    names = {id(p): canonical_name(name) for name, p in model.named_parameters()}
    found = {}
    for adapter in adapters.values():
        layer: Any = adapter
        while is_adapter(layer):  # one wrapper for each parameter of the same module
            name = getattr(layer, "parameter_name", None)
            if name is not None:
                parameter = getattr(base_layer(layer), name)
                found[id(parameter)] = names[id(parameter)]
            layer = layer.base_layer
    return found


def _refuse_trained_routes(model: nn.Module, held: Routes, adapted: Iterable[LinearModule], fused: Fused) -> None:
    wrapped = _wrapped_parameters(model, _adapters(model))
    whole = [m for m in adapted if m.left_out == "routing"]
    partly = [m for m in adapted if m.left_out == "fused"]
    parameters = dict(model.named_parameters())
    copied = [name for name in held.parameters if parameters[name].requires_grad] + trainable_copies(model, held)
    stacked = [wrapped[id(parameters[name])] for name in held.parameters if id(parameters[name]) in wrapped]
    trained = [canonical_name(m.name) for m in whole] + [canonical_name(name) for name in copied] + stacked
    remedy = "use target_modules and exclude_modules of lora_targets(model), or lora_config(model)"
    if trained:
        raise ValueError(
            f"{len(trained)} query or key tensors of full attention would be trained: {', '.join(trained[:4])}"
            f"{' ...' if len(trained) > 4 else ''}; {remedy}"
        )
    if partly and fused == "exclude":
        raise ValueError(
            "adapters sit on tensors that are partly queries or keys: "
            f"{summarise((m.inner, m.layer) for m in partly)}; {remedy}, or pass fused='include' here and train with "
            "RouteGuard(protect=Freeze())"
        )
