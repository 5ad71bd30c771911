"""The whole start of a run that averages at its end or pulls every weight: kept on disk, as large as the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from routeguard.checkpoint.sidecar import SIDECAR_FOLDER
from routeguard.checkpoint.tensors import read_tensor
from routeguard.protect.l2_sp import trained_weights
from routeguard.protect.lora_modules import has_adapters
from routeguard.protect.modes import Average
from routeguard.restoration.adapter_average import refuse_moved, refuse_unmerged
from routeguard.restoration.average_report import AverageReport
from routeguard.restoration.averaging import average, checked_weights, refuse_unfit
from routeguard.restoration.meaning import meaning_of
from routeguard.restoration.sources import ReferenceSource, Source, as_source
from routeguard.routes.names import canonical_name
from routeguard.sharding.processes import done_by_the_first, from_the_first, in_several_processes, is_first_process
from routeguard.storage.aside import move_aside
from routeguard.storage.durable import written_beside
from routeguard.storage.folder import stored_tensors
from routeguard.storage.header import StoredTensor, read_header
from routeguard.storage.row_bytes import Slice
from routeguard.training.run_state import WHOLE_START_DIGEST, WHOLE_START_FILE


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
    digest: str,
    insist: bool,
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
        digest: of the routing that the run protects; a file that was kept beside another is not this run's.
        insist: go on although the start means something else, or the kept file is another run's.
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
        named = WholeStart(wanted, is_own=False)
        if to_average:
            done_by_the_first(lambda: _check_average(model, named, insist))
        return named
    if resumed or again:
        folders = [*([resumed_from, resumed_from.parent] if resumed_from else []), output_dir]
        return WholeStart(done_by_the_first(lambda: _kept_file(folders, digest, insist)), is_own=True)
    if to_average:
        refuse_moved(needed)
    file = output_dir / SIDECAR_FOLDER / WHOLE_START_FILE
    if is_first_process():
        _keep(file, needed, digest)
    return WholeStart(from_the_first(str(file)), is_own=True)


def _keep(file: Path, weights: Mapping[str, Tensor], digest: str) -> None:
    """Write the start; one of an earlier run is moved aside, unless it is the very same (a run that is begun again)."""
    if file.is_file():
        if read_header(file).metadata.get(WHOLE_START_DIGEST) == digest and _equal(stored_tensors([file]), weights):
            return
        move_aside(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights.items()}
    with written_beside(file) as beside:
        save_file(tensors, beside, metadata={"format": "pt", WHOLE_START_DIGEST: digest})


def _equal(kept: Mapping[str, StoredTensor], weights: Mapping[str, Tensor]) -> bool:
    """Whether a file has exactly these weights; it is read one tensor at a time."""
    if kept.keys() != weights.keys():
        return False
    pairs = ((read_tensor(Slice(kept[name], None, 0)), weight.detach().cpu()) for name, weight in weights.items())
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def _check_average(model: nn.Module, start: WholeStart, insist: bool) -> None:
    checked_weights(model, start.reference, insist=insist)


def _kept_file(folders: Sequence[Path], digest: str, insist: bool) -> str:
    """The file that a run kept; raises ValueError if there is none, or only those of other runs."""
    files = [file for folder in folders if (file := folder / SIDECAR_FOLDER / WHOLE_START_FILE).is_file()]
    own = [file for file in files if read_header(file).metadata.get(WHOLE_START_DIGEST) == digest]
    if not files:
        raise ValueError(
            f"the start of every weight, which the run needs, is gone: no {SIDECAR_FOLDER}/{WHOLE_START_FILE} in "
            f"{', '.join(map(str, folders))}. Give reference=PATH of the original model"
        )
    if not own and not insist:
        raise ValueError(
            f"{files[0]} was kept by another run than the one that goes on, and is not its start. Give reference=PATH "
            "of the original model, or insist=True to take this file"
        )
    return str((own or files)[0])


@torch.no_grad()
def trained_start(model: nn.Module, start: WholeStart) -> dict[str, Tensor]:
    """The start of every trained weight, by canonical name, on its device and in its dtype.

    Read by the first process, sent to the others.

    Raises ValueError, in every process alike, for a start that lacks weights, has others than the model, or holds NaN.
    """
    trained = trained_weights(model)
    opened: list[Source] = []  # in the first process
    done_by_the_first(lambda: opened.append(_source_of_all(model, start, trained)))
    starts = {}
    for name, parameter in trained.items():
        values = opened[0].read(name, None, 0) if opened else torch.empty_like(parameter)
        values = values.to(parameter.device, parameter.dtype)
        if in_several_processes():
            torch.distributed.broadcast(values, src=0)
        if not values.isfinite().all():
            raise ValueError(f"the start of {name} holds NaN or infinite values: L2SP would pull towards them")
        starts[name] = values
    return starts


def _source_of_all(model: nn.Module, start: WholeStart, trained: Mapping[str, nn.Parameter]) -> Source:
    """The start, if it has every trained weight as the model does; else ValueError."""
    source = start.source(model)
    if not start.is_own:
        refuse_unmerged(model, source)
    wrong = [name for name, p in trained.items() if source.shapes.get(name) != tuple(p.shape)]
    if wrong:
        raise ValueError(
            f"the start, {source.origin}, lacks {len(wrong)} of the {len(trained)} trained weights, or has them in "
            f"another shape: {', '.join(wrong[:4])}. L2SP needs the start of every weight"
            + ("; that of adapters is in the model: leave `reference` out" if has_adapters(model) else "")
        )
    return source


@torch.no_grad()
def average_at_end(model: nn.Module, start: WholeStart, mode: Average, *, insist: bool) -> AverageReport:
    """Average in the first process, which has the start and saves the model; the others are sent the result."""
    report = done_by_the_first(lambda: average(model, start.source(model), mode.alpha, insist=insist))
    if in_several_processes():
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, src=0)
    return report
