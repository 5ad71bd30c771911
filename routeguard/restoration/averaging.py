"""Average every weight of a tuned model with its start (WiSE-FT), for good (`average`) or for a while (`averaged`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.protect.lora_modules import has_adapters
from routeguard.protect.modes import checked_alpha
from routeguard.restoration.adapter_average import adapter_weights, refuse_unfit_adapters, refuse_unmerged
from routeguard.restoration.average_report import AverageReport, without_start
from routeguard.restoration.meaning import check_same_meaning, meaning_of
from routeguard.restoration.rounding import NARROW, round_at_random
from routeguard.restoration.sources import ReferenceSource, Source, as_source
from routeguard.routes.in_memory import is_quantised
from routeguard.routes.names import canonical_name
from routeguard.sharding.split import is_split


def average(
    model: nn.Module, reference: ReferenceSource | Source, alpha: float = 0.1, *, insist: bool = False
) -> AverageReport:
    """Move every weight the fraction `alpha` of the way back to its start, in place: `W ← (1 − α)·W + α·W₀`.

    The method is WiSE-FT (arXiv 2109.01903), whose α counts from the start; ours counts from the tuned model, as
    `Interpolate` does. Other than a restore, it gives up a little of everything that fine-tuning taught. Computed in
    float32 (float64 for float64); 16-bit weights are rounded at random, so that a small step is kept on average.

    Args:
        model: the tuned model. A LoRA that started at zero is averaged by scaling its B (its base, if not quantised, by
            `reference`).
        reference: the start, whole: a model, a state dict, a checkpoint folder, a safetensors file. For adapters, that
            of the base.
        alpha: above 0, up to 1 (the start itself). Default 0.1 (measured on tiny hybrids, docs/evidence).
        insist: go on although the models differ in what gives the weights their meaning, or the start lacks some
            weights, which then stay as tuned. Default: no.

    Returns:
        An `AverageReport`: how many tensors, how far they had moved, how many entries were rounded at random.

    Raises:
        ValueError: another model, missing weights, NaN, quantised weights, adapters that are not linear in one tensor
            or did not start at zero, weights split over processes, a start that is the model itself or carries an
            adapter. The model is then unchanged.
    """
    alpha = checked_alpha(alpha)
    weights, source, notes = checked_weights(model, reference, insist=insist)
    return _average(weights, source, alpha, notes)


@contextmanager
def averaged(
    model: nn.Module, reference: ReferenceSource | Source, alpha: float = 0.1, *, insist: bool = False
) -> Iterator[AverageReport]:
    """`with averaged(model, start): evaluate(model)`: averaged inside, the tuned weights back bit for bit after.

    Arguments and errors are those of `average`. A copy of the tuned weights is kept meanwhile, on their device.
    """
    alpha = checked_alpha(alpha)
    weights, source, notes = checked_weights(model, reference, insist=insist)
    tuned = {name: weight.detach().clone() for name, weight in weights.items()}
    try:
        yield _average(weights, source, alpha, notes)
    finally:
        with torch.no_grad():
            for name, values in tuned.items():
                weights[name].copy_(values)


def checked_weights(
    model: nn.Module, reference: ReferenceSource | Source, *, insist: bool
) -> tuple[dict[str, nn.Parameter], Source, tuple[str, ...]]:
    """The weights to average, by canonical name, where their start is read, and notes; nothing is changed.

    Raises ValueError as `average` does.
    """
    refuse_unfit(model)
    if _shares_memory(model, reference):
        raise ValueError(
            "the start shares its memory with the model, so it moves with it and there is nothing to go back to; give "
            "a copy from before the training (copy.deepcopy(model), or its folder); a guarded run needs no reference"
        )
    source = reference if isinstance(reference, Source) else as_source(reference, model)
    refuse_unmerged(model, source)
    if has_adapters(model):
        weights, source = adapter_weights(model, source)
    else:
        weights = {canonical_name(name): weight for name, weight in model.named_parameters()}
    missing = [name for name, weight in weights.items() if source.shapes.get(name) != tuple(weight.shape)]
    notes = without_start(missing, source.origin, insist=insist, total=len(weights))
    notes += tuple(check_same_meaning(meaning_of(model), source.meaning, insist=insist))
    weights = {name: weight for name, weight in weights.items() if name not in set(missing)}
    bad = [f"{name} in the model" for name, weight in weights.items() if not weight.detach().isfinite().all()]
    bad += [f"{name} in the start" for name in weights if not source.read(name, None, 0).isfinite().all()]
    if bad:
        raise ValueError(
            f"NaN or infinite weights: {', '.join(bad[:4])}; a run that diverged cannot be averaged, use an earlier "
            "checkpoint"
        )
    return weights, source, (*notes, *source.notes)


def _shares_memory(model: nn.Module, reference: ReferenceSource | Source) -> bool:
    tensors: Iterable[Any] = ()
    if isinstance(reference, nn.Module):
        tensors = reference.parameters()
    elif isinstance(reference, Mapping):
        tensors = reference.values()
    own = {parameter.data_ptr() for parameter in model.parameters() if parameter.numel() and not parameter.is_meta}
    return any(isinstance(t, Tensor) and not is_split(t) and not t.is_meta and t.data_ptr() in own for t in tensors)


def refuse_unfit(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be averaged: split over processes, quantised, or with some adapters.

    Quantised weights under adapters are frozen, and stay as they are.
    """
    adapted = has_adapters(model)
    for name, weight in model.named_parameters():
        if is_split(weight):
            raise ValueError(
                f"{name} is split over processes; save the model and average what was saved: "
                "routeguard average BASE TUNED --out FIXED"
            )
        if not adapted and (is_quantised(weight) or not weight.is_floating_point()):
            raise ValueError(
                f"{name} is quantised, and is not averaged; dequantise the model first (model.dequantize())"
            )
    if adapted:
        refuse_unfit_adapters(model)


@torch.no_grad()
def _average(
    weights: Mapping[str, nn.Parameter], source: Source, alpha: float, notes: tuple[str, ...]
) -> AverageReport:
    moved = size = 0.0
    generator = torch.Generator().manual_seed(0)  # the same models give the same average
    for name, weight in weights.items():
        wide = torch.promote_types(weight.dtype, torch.float32)
        start = source.read(name, None, 0).to(weight.device, wide)
        tuned = weight.detach().to(wide)
        moved += _squares(tuned - start)
        size += _squares(start)
        mean = round_at_random((1 - alpha) * tuned + alpha * start, weight.dtype, generator)
        weight.copy_(torch.where(tuned == start, weight, mean))  # what never moved keeps its bits
    return AverageReport(
        alpha=alpha,
        origin=source.origin,
        num_tensors=len(weights),
        num_entries=sum(weight.numel() for weight in weights.values()),
        drift_before=(moved / size) ** 0.5 if size else None,
        num_16_bit=sum(weight.numel() for weight in weights.values() if weight.dtype in NARROW),
        notes=notes,
    )


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
