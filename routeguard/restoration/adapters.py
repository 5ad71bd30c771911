"""Restore inside adapters: what to write so that the routed weight acts as it did before training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.held import Held, adapter_of, peft_layer, starts_at_zero
from routeguard.protect.modes import Interpolate, QKPro, Restoration
from routeguard.protect.rows import take_rows
from routeguard.restoration.methods import spread
from routeguard.restoration.reference import Reference
from routeguard.routes.collection import Route
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.names import canonical_name


def adapted_modules(held: Sequence[Held]) -> dict[str, list[Held]]:
    """Adapter tensors by the base parameter (its name in the model) that they sit on."""
    groups: dict[str, list[Held]] = defaultdict(list)
    for piece in held:
        if piece.part != "base":
            groups[piece.routes[0].parameter].append(piece)
    return dict(groups)


def refuse_merged(model: nn.Module, routes: Sequence[Route]) -> None:
    """Raise ValueError if an adapter is merged into a routed weight: the weight then holds what the adapter learned."""
    merged = [
        name for name in dict.fromkeys(r.parameter for r in routes) if getattr(peft_layer(model, name), "merged", False)
    ]
    if merged:
        raise ValueError(
            f"adapters are merged into {len(merged)} routed weights (first: {merged[0]}); call unmerge_adapter() "
            "before restoring, or merge_and_unload() and restore the plain model from the base checkpoint"
        )


def restored_adapter(
    model: nn.Module, group: Sequence[Held], reference: Reference, method: Restoration
) -> dict[str, Tensor]:
    """New values for the tensors of one adapted module, by name in the model: the held rows of those that change.

    With the initial adapter tensors in the reference they are put back; with only the base weight, a LoRA that started
    at zero goes back to zero, and DoRA's magnitude to the norm of the base weight's rows (its initial value).

    Raises:
        ValueError: the method has no meaning inside an adapter, or the start cannot be known.
    """
    where = group[0].name.partition(".lora_")[0]
    if isinstance(method, QKPro):
        raise ValueError(
            f"QK-Pro is not defined inside an adapter ({where}): its result has no low-rank form. Merge the adapter "
            "first (merge_and_unload) and restore the plain model, or use method='qk'"
        )
    initial = {piece.name: reference.tensors.get(piece.canonical) for piece in group}
    known = {name: values for name, values in initial.items() if values is not None}
    if len(known) < len(group):
        _refuse_unknown_start(model, group, where, reference)
        _check_base(model, group, reference)
        known = _start_from_base(model, group)
    if isinstance(method, Interpolate):
        return _interpolated(group, known, method.alpha, where)
    return _put_back(group, known, where)


def adapter_drift(
    model: nn.Module, group: Sequence[Held], reference: Reference, route: Route
) -> tuple[float, float] | None:
    """Squared norms of (movement, start weight) of a route's rows inside a LoRA, or None where they cannot be told."""
    layer = peft_layer(model, route.parameter)
    if (
        not hasattr(layer, "lora_A")
        or any(piece.part in ("magnitude", "adapter") for piece in group)
        or len(route.shape) != 2
    ):
        return None
    base = reference.tensors.get(canonical_name(route.parameter))
    if base is not None:
        start = reference.values(canonical_name(route.parameter), route.rows, route.dim).float()
    else:
        weight = _dense_weight(layer.get_base_layer())
        if weight is None:
            return None
        start = take_rows(weight, route.rows, route.dim).float().cpu()
    start = start if route.dim == 0 else start.T
    moved = torch.zeros_like(start)
    for adapter in dict.fromkeys(piece.adapter for piece in group):
        a, b = (module[adapter].weight.detach().float().cpu() for module in (layer.lora_A, layer.lora_B))
        a0, b0 = (_initial(group, reference, f"lora_{which}", adapter) for which in "AB")
        a0, b0 = (a if a0 is None else a0), (torch.zeros_like(b) if b0 is None else b0)
        b, b0 = take_rows(b, route.rows), take_rows(b0, route.rows)
        scale = float(layer.scaling[adapter])
        moved += scale * ((b - b0) @ a + b0 @ (a - a0))
        start = start + scale * (b0 @ a0)
    return float(torch.linalg.vector_norm(moved)) ** 2, float(torch.linalg.vector_norm(start)) ** 2


def _dense_weight(base_layer: Any) -> Tensor | None:
    """The weight under an adapter, dequantised from 4 bits; None for other formats, and where a CPU has packed it anew.

    PEFT reads 8-bit weights too, but puts another parameter in the layer's place meanwhile.
    """
    weight = base_layer.weight
    if not is_quantised(weight):
        return weight.detach()  # type: ignore[no-any-return]
    state = getattr(weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return None
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(base_layer).detach()  # type: ignore[no-any-return]


def _initial(group: Sequence[Held], reference: Reference, part: str, adapter: str) -> Tensor | None:
    for piece in group:
        if piece.part == part and f".{part}.{adapter}.weight" in piece.name and piece.canonical in reference.tensors:
            return spread(piece, reference.tensors[piece.canonical].float())
    return None


def _refuse_unknown_start(model: nn.Module, group: Sequence[Held], where: str, reference: Reference) -> None:
    remedy = (
        "give a reference with the initial adapter tensors: what the guard kept (routeguard/reference.safetensors), or "
        "the state dict or adapter folder saved before the first step"
    )
    other = [piece.name for piece in group if piece.part == "adapter"]
    if other:
        raise ValueError(f"the start of {other[0]} is not known from the base weights ({reference.origin}); {remedy}")
    adapters = dict.fromkeys(adapter_of(piece.name) for piece in group)
    unknown = [adapter for adapter in adapters if not starts_at_zero(model, adapter)]
    if unknown:
        raise ValueError(
            f"adapter {unknown[0]!r} on {where} did not start at zero (PiSSA, OLoRA, LoftQ or random B), and the "
            f"reference ({reference.origin}) lacks its initial tensors: B = 0 would not be its start; {remedy}"
        )


def _check_base(model: nn.Module, group: Sequence[Held], reference: Reference) -> None:
    """An adapter at zero gives the model's own base weight, so that one must be the reference's."""
    route = group[0].routes[0]
    weight = peft_layer(model, route.parameter).get_base_layer().weight
    name = canonical_name(route.parameter)
    if is_quantised(weight) or weight.requires_grad or name not in reference.tensors:
        return
    rows, dim = reference.rows[name], reference.dims[name]
    mine = take_rows(weight.detach(), rows, dim).cpu()
    if not torch.equal(mine, reference.tensors[name].to(mine.dtype)):
        raise ValueError(
            f"the weight under the adapter, {route.parameter}, is not that of the reference ({reference.origin}); "
            "taking the adapter off would give other weights. Give the checkpoint that the adapter was trained on"
        )


def _start_from_base(model: nn.Module, group: Sequence[Held]) -> dict[str, Tensor]:
    """A is left out: with B at zero it does not matter, and it may serve other rows."""
    start = {}
    for piece in group:
        if piece.part == "lora_B":
            start[piece.name] = torch.zeros_like(take_rows(piece.parameter.detach(), piece.rows, piece.dim))
        elif piece.part == "magnitude":
            start[piece.name] = take_rows(_initial_magnitude(model, piece), piece.rows, piece.dim)
    return start


def _initial_magnitude(model: nn.Module, piece: Held) -> Tensor:
    """DoRA's magnitude before training: PEFT's norm of the base weight, one value a row."""
    from peft.utils.integrations import dequantize_module_weight

    layer = peft_layer(model, piece.routes[0].parameter)
    weight = dequantize_module_weight(layer.get_base_layer()).detach()
    magnitude = layer.lora_magnitude_vector[adapter_of(piece.name)]
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)  # in the base's dtype, as PEFT does at the start
    norm: Tensor = magnitude.get_weight_norm(weight, zero, 1.0)
    return norm.detach().reshape(piece.parameter.shape).to(piece.parameter.dtype)


def _put_back(group: Sequence[Held], known: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    starts = {piece.name: _like(known[piece.name], piece) for piece in group if piece.name in known}
    partial = any(piece.rows is not None for piece in group)
    if not partial:
        return starts
    for piece in group:  # A serves the rows beside the held ones too, so it stays
        if piece.part == "lora_A" and piece.name in starts:
            a0 = starts.pop(piece.name)
            b0 = next(
                s
                for p in group
                if p.part == "lora_B" and adapter_of(p.name) == adapter_of(piece.name)
                for s in [starts[p.name]]
            )
            if b0.any() and not torch.equal(a0, piece.parameter.detach().cpu()):
                raise ValueError(
                    f"{where} is held in part, its adapter did not start at zero and lora_A has moved: no value "
                    "of the held rows of lora_B gives the start back without touching the other rows. Restore all its "
                    "rows, or merge the adapter and restore the plain model"
                )
    return starts


def _interpolated(group: Sequence[Held], known: dict[str, Tensor], alpha: float, where: str) -> dict[str, Tensor]:
    """ΔW shrinks by 1 − α when B does. DoRA's magnitude moves the same way (its weight is not linear in it)."""
    if alpha == 1:
        return _put_back(group, known, where)
    moved = {}
    for piece in group:
        if piece.part == "adapter" or (piece.part == "lora_B" and known[piece.name].any()):
            what = "is not LoRA" if piece.part == "adapter" else "did not start at zero"
            raise ValueError(
                f"the adapter on {where} {what}, so ΔW cannot be shrunk inside it. Merge it first (merge_and_unload) "
                "and interpolate the plain model, or use method='qk'"
            )
        if piece.part != "lora_A":
            now = take_rows(piece.parameter.detach(), piece.rows, piece.dim)
            moved[piece.name] = ((1 - alpha) * now.float() + alpha * known[piece.name].to(now.device).float()).to(
                now.dtype
            )
    return moved


def _like(values: Tensor, piece: Held) -> Tensor:
    return values.to(piece.parameter.dtype).cpu()
