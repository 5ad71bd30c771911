"""The whole start of a run that averages at its end or pulls every weight: kept on disk, as large as the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from routeguard.checkpoint.sidecar import SIDECAR_FOLDER
from routeguard.protect.l2_sp import trained_weights
from routeguard.protect.lora_modules import has_adapters
from routeguard.protect.modes import Average
from routeguard.restoration.adapter_average import refuse_moved
from routeguard.restoration.average_report import AverageReport
from routeguard.restoration.averaging import average, refuse_unfit
from routeguard.restoration.meaning import meaning_of
from routeguard.restoration.sources import ReferenceSource, Source, as_source
from routeguard.routes.names import canonical_name
from routeguard.sharding.processes import from_the_first, in_several_processes, is_first_process
from routeguard.storage.durable import written_beside
from routeguard.training.run_state import WHOLE_START_FILE


@dataclass(frozen=True, eq=False)
class WholeStart:
    """Where the start of every weight can be read, also when training ends; opened by the first process only.

    `is_own` says that the run wrote it itself: it is the start of the very model that is trained.
    """

    reference: ReferenceSource
    is_own: bool

    def source(self, model: nn.Module) -> Source:
        """The start for a model, or for an average that a callback keeps of it."""
        found = as_source(self.reference, model)
        return replace(found, meaning=meaning_of(model)) if self.is_own else found


def keep_whole_start(
    model: nn.Module,
    wanted: Any,
    *,
    to_average: bool,
    output_dir: Path,
    resumed_from: Path | None,
    resumed: bool,
    again: bool,
) -> WholeStart:
    """Make sure that the start of every weight can be read, now and when training ends, and say where.

    Of a model with adapters, only what is trained is kept: the base stays.

    Args:
        model: the model, before its first step.
        wanted: the guard's `reference`, which then has to hold every weight; None or "start": the live weights, written
            to `OUTPUT/routeguard/start.safetensors` by the first process.
        to_average: for an average at the end, whose refusals come now; else for a pull.
        output_dir, resumed_from: folders of the run, and of the checkpoint that it goes on from.
        resumed: the run goes on; the file that it kept is the start.
        again: this is a further `train()` of the same model, whose first start is kept.

    Raises:
        ValueError: with `to_average`, weights that cannot be averaged; a resumed run whose file is gone.
    """
    if has_adapters(model):
        needed = trained_weights(model)
    else:
        needed = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    if to_average:
        refuse_unfit(model)
    if wanted is not None and not (isinstance(wanted, str) and wanted == "start"):
        return WholeStart(wanted, is_own=False)
    if to_average and not (resumed or again):
        refuse_moved(needed)
    folders = [output_dir, *([resumed_from, resumed_from.parent] if resumed_from else [])]
    kept = next((f for folder in folders if (f := folder / SIDECAR_FOLDER / WHOLE_START_FILE).is_file()), None)
    if resumed or again:
        found = from_the_first(None if kept is None else str(kept))
        if found is None:
            raise ValueError(
                f"the start of every weight, which the run needs, is gone: no {SIDECAR_FOLDER}/{WHOLE_START_FILE} in "
                f"{', '.join(map(str, folders))}. Give reference=PATH of the original model"
            )
        return WholeStart(found, is_own=True)
    file = output_dir / SIDECAR_FOLDER / WHOLE_START_FILE
    if is_first_process():
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().to("cpu", copy=True).contiguous() for name, p in needed.items()}
        with written_beside(file) as beside:
            save_file(tensors, beside, metadata={"format": "pt"})
    return WholeStart(from_the_first(str(file)), is_own=True)


@torch.no_grad()
def trained_start(model: nn.Module, start: WholeStart) -> dict[str, Tensor]:
    """The start of every trained weight, by canonical name, on its device and in its dtype.

    Read by the first process, sent to the others.

    Raises ValueError, in every process alike, for a start that lacks weights, has others than the model, or holds NaN.
    """
    trained = trained_weights(model)
    source, failure = None, ""
    if is_first_process():
        try:
            source = start.source(model)
            wrong = [name for name, p in trained.items() if source.shapes.get(name) != tuple(p.shape)]
            if wrong:
                failure = (
                    f"the start, {source.origin}, lacks {len(wrong)} of the {len(trained)} trained weights, or has "
                    f"them in another shape: {', '.join(wrong[:4])}. L2SP needs the start of every weight"
                    + ("; that of adapters is in the model: leave `reference` out" if has_adapters(model) else "")
                )
        except ValueError as error:
            failure = str(error)
    failure = from_the_first(failure)
    if failure:
        raise ValueError(failure)
    starts = {}
    for name, parameter in trained.items():
        values = torch.empty_like(parameter) if source is None else source.read(name, None, 0)
        values = values.to(parameter.device, parameter.dtype)
        if in_several_processes():
            torch.distributed.broadcast(values, src=0)
        if not values.isfinite().all():
            raise ValueError(f"the start of {name} holds NaN or infinite values: L2SP would pull towards them")
        starts[name] = values
    return starts


@torch.no_grad()
def average_at_end(model: nn.Module, start: WholeStart, mode: Average) -> AverageReport:
    """Average in the first process, which has the start and saves the model; the others are sent the result."""
    if not in_several_processes():
        return average(model, start.source(model), mode.alpha)
    report, failure = None, ""
    if is_first_process():
        try:
            report = average(model, start.source(model), mode.alpha)
        except ValueError as error:
            failure = str(error)
    failure = from_the_first(failure)
    if failure:
        raise ValueError(failure)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
    result: AverageReport = from_the_first(report)
    return result
