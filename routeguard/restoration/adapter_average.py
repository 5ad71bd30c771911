"""Averaging a PEFT model with its start: which of its tensors move, and where those of a fresh adapter began."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from routeguard.protect.adapter_start import ZERO_FACTORS
from routeguard.protect.held import peft_configs, starts_at_zero
from routeguard.protect.lora_modules import active_adapters, has_adapters
from routeguard.restoration.sources import Source
from routeguard.routes.collection import Rows
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.names import canonical_name

_MERGE = "merge the adapter (merge_and_unload) and average the merged model"
_ADAPTER = re.compile(r"\.(?:lora_[A-Za-z_]+|modules_to_save)\.(?P<adapter>[^.]+)")


def refuse_unfit_adapters(model: nn.Module) -> None:
    """Raise ValueError for an active adapter that is not linear in one of its tensors, or did not start at zero."""
    configs = peft_configs(model)
    for adapter in sorted(active_adapters(model)):
        config = configs.get(adapter)
        kind = str(getattr(getattr(config, "peft_type", None), "value", "unknown"))
        if kind != "LORA" or getattr(config, "use_dora", False):
            kind = "DoRA" if kind == "LORA" else kind
            raise ValueError(f"{adapter!r} is a {kind} adapter, which is not linear in one of its tensors: {_MERGE}")
        if not starts_at_zero(model, adapter):
            init = getattr(config, "init_lora_weights", None)
            raise ValueError(f"{adapter!r} has init_lora_weights={init!r}, so it did not start at zero: {_MERGE}")


def adapter_weights(model: nn.Module, source: Source) -> tuple[dict[str, nn.Parameter], Source]:
    """The tensors of a PEFT model that an average moves, by canonical name, and a source that has their starts.

    A LoRA that started at zero adds s·B·A, so its average is the factor that was zero, scaled by `1 − α` (derived).
    Whole tensors (`modules_to_save`, biases, an unquantised base) are averaged with their start in `source`; what is
    frozen and not in `source` stays, and so do adapters that are not active.
    """
    active = active_adapters(model)
    weights, zeros = {}, {}
    for name, parameter in model.named_parameters():
        piece = _ADAPTER.search(name)
        if is_quantised(parameter) or ".original_module." in name or (piece and piece["adapter"] not in active):
            continue
        canonical = canonical_name(name)
        if _began_at_zero(name):
            zeros[canonical] = tuple(parameter.shape)
        elif ".lora_" in name or (not parameter.requires_grad and canonical not in source.shapes):
            continue
        weights[canonical] = parameter
    return weights, _with_zeros(source, zeros)


def refuse_unmerged(model: nn.Module, source: Source) -> None:
    """Raise ValueError for a start with an adapter on its weights, for a model without: its bare weights are no start.

    Also, for a model with adapters, one whose adapter is not at zero, where that of the model began.
    """
    if has_adapters(model):
        moved = [n for n in source.shapes if _began_at_zero(n) and bool(source.read(n, None, 0).any())]
        if moved:
            raise ValueError(
                f"the start ({source.origin}) carries an adapter that is not at zero ({moved[0]}); give the base, or "
                f"{_MERGE}"
            )
        return
    modules = {name.rpartition(".")[0] for name in source.shapes if name.endswith(".weight")}
    pieces = [name for name in source.shapes if any(parent in modules for parent in _above(name))]
    if pieces:
        raise ValueError(
            f"the start ({source.origin}) carries an adapter ({', '.join(pieces[:2])}), so its bare weights are not "
            "what it computed with; merge it first (merge_and_unload), or give the base checkpoint"
        )


def _above(name: str) -> list[str]:
    """The modules around a tensor's own: "a.b.c.weight" → "a.b", "a"."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 2, 0, -1)]


def refuse_moved(starts: Mapping[str, Tensor]) -> None:
    """Raise ValueError for an adapter that is not at zero where a run starts that averages at its end."""
    moved = [name for name, start in starts.items() if _began_at_zero(name) and bool(start.any())]
    if moved:
        raise ValueError(
            f"restore='average' takes an adapter back to where this run starts, and {moved[0]} is not at zero there "
            "(it was trained before): no factor alone can be averaged. Merge the adapter and start a fresh one"
        )


def _began_at_zero(name: str) -> bool:
    return any(factor in name for factor in ZERO_FACTORS)


def _with_zeros(source: Source, zeros: Mapping[str, tuple[int, ...]]) -> Source:
    def read(name: str, rows: Rows | None, dim: int) -> Tensor:
        return torch.zeros(zeros[name]) if name in zeros else source.read(name, rows, dim)

    return replace(source, shapes={**source.shapes, **zeros}, read=read)
