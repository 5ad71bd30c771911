"""Decide which start a run protects: fresh, resumed, or a further stage of a guarded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME

from routeguard.checkpoint.sidecar import SIDECAR_FILE, SIDECAR_FOLDER, read_facts
from routeguard.protect.held import Held, adapter_of, starts_at_zero, trained_adapters, without_idle_adapters
from routeguard.protect.modes import Freeze, Protection
from routeguard.protect.rows import take_rows
from routeguard.restoration.lookup import open_reference
from routeguard.restoration.meaning import check_same_meaning, meaning_of
from routeguard.restoration.reference import Reference, capture_reference, load_reference
from routeguard.routes.in_memory import applied_parameters, model_name
from routeguard.routes.names import canonical_name
from routeguard.routes.wording import first_of
from routeguard.sharding.whole import whole_tensor
from routeguard.training.run_state import RunState, read_state


@dataclass(frozen=True)
class Start:
    """The protected start and which guarded stage of these weights the run is.

    `reference` holds the values; None for `Freeze`, which needs no copy of whole tensors. Where an engine splits the
    parameters, only the first process keeps its tensors, and `shards` has this process' part of each. `notes` say what
    could not be compared with a named reference, or was insisted on.
    """

    digest: str
    origin: str
    stage: int
    reference: Reference | None
    shards: Mapping[str, Tensor] | None = None
    notes: tuple[str, ...] = ()

    def of_shards(self, shards: Mapping[str, Tensor], *, is_first: bool) -> Start:
        """The same start where this process keeps its part; all but the first process let go of whole tensors."""
        reference = self.reference
        if reference is not None and not is_first:
            reference = replace(reference, tensors={}, known_digest=self.digest)
        return replace(self, reference=reference, shards=shards)


def find_start(
    wanted: Any,
    model: nn.Module,
    held: Sequence[Held],
    settings: RunState,
    protect: Protection,
    *,
    output_dir: Path,
    resumed_from: Path | None,
    resumed: bool,
    kept: Start | None,
    insist: bool,
) -> Start:
    """The start that a run protects.

    Order: an explicit `wanted` reference; on resume what the run has kept; what an earlier `train()` of the same
    model protected (`kept`); else the live weights. "start" names the live weights of a run's beginning, and so, when a
    guarded run is resumed, the start that it kept. Settings and start of a resumed run are compared with what it had.

    Raises:
        ValueError: a resumed run whose settings, start or sidecar do not fit; a further stage that does not say which
            start it protects; a frozen start that differs from the live weights; a reference with NaN, or from a model
            in which the same weights mean something else (another rotary base, say).
    """
    by_name = None if wanted is None or (isinstance(wanted, str) and wanted == "start") else wanted
    state = (
        refuse_changed_settings(settings, output_dir, resumed_from, insist=insist, required=wanted is None)
        if resumed
        else None
    )
    previous = _previous_stage(model)
    stage = state.stage if state is not None else previous.stage + 1 if previous is not None else 1
    if isinstance(protect, Freeze):
        held = [h for h in held if not h.is_shared_factor]
    if by_name is not None:
        return _named(by_name, model, held, protect, state, stage, fresh=not resumed, insist=insist)
    if state is not None and not (wanted == "start" and insist):
        return _kept_by_run(model, held, protect, state, _folders(output_dir, resumed_from), insist)
    live = _start_of(
        capture_reference(model, held, origin="live weights at the start of training", gather=True), protect, stage
    )
    if resumed or (wanted is not None and kept is None):
        return live
    if kept is not None:
        if isinstance(protect, Freeze) and kept.digest != live.digest:
            raise ValueError(
                "queries and keys changed between two train() calls of a frozen model; say reference='start' on a "
                "new guard to hold them where they are now"
            )
        return kept
    _refuse_unnamed_stage(model, held, previous, live)
    return live


def _start_of(reference: Reference, protect: Protection, stage: int) -> Start:
    return Start(reference.digest, reference.origin, stage, None if isinstance(protect, Freeze) else reference)


def _named(
    wanted: Any,
    model: nn.Module,
    held: Sequence[Held],
    protect: Protection,
    state: RunState | None,
    stage: int,
    *,
    fresh: bool,
    insist: bool,
) -> Start:
    reference = open_reference(wanted, model, held)
    notes = check_same_meaning(meaning_of(model), reference.meaning, insist=insist)
    unsound = [name for name, values in reference.tensors.items() if not values.isfinite().all()]
    if unsound:
        raise ValueError(
            f"the reference ({reference.origin}) has NaN or infinite entries in {first_of(unsound)}: there is no sound "
            "start to protect"
        )
    if state is not None and state.reference_digest != reference.digest and not insist:
        raise ValueError(
            f"the resumed run protected another start ({state.reference_origin}) than the reference given now "
            f"({reference.origin}); give the same one, leave it out, or insist=True to go on with the new one"
        )
    if isinstance(protect, Freeze):
        moved = _differing(reference, model, held)
        if moved:
            raise ValueError(
                "Freeze holds the live weights, but their queries and keys differ from the reference "
                f"({reference.origin}) in {first_of(moved)}; put them back first with "
                "routeguard.restore(model, reference), or use Track() or Anchor() with restore=QKRestore()"
            )
    elif fresh:
        trained = _unknown_adapters(model, held, reference)
        if trained:
            raise ValueError(
                f"the reference ({reference.origin}) holds no start of {first_of(trained)}, which is not at zero: give "
                "the adapter as it was at the start (its folder, or what a guarded run kept), or reference='start'"
            )
    return replace(_start_of(reference, protect, stage), notes=(*notes, *reference.notes))


def _differing(reference: Reference, model: nn.Module, held: Sequence[Held]) -> list[str]:
    """Tensors whose held rows are not those of the reference. An adapter that the reference lacks must be at zero."""
    live = {canonical_name(name): parameter for name, parameter in applied_parameters(model)}
    moved = [
        name
        for name, start in reference.tensors.items()
        if live[name].dtype.is_floating_point
        and not torch.equal(
            take_rows(whole_tensor(live[name]), reference.rows[name], reference.dims[name]).cpu(), start
        )
    ]
    return moved + _unknown_adapters(model, held, reference)


def _unknown_adapters(model: nn.Module, held: Sequence[Held], reference: Reference) -> list[str]:
    """Factors of active adapters that are not at zero, and of which the reference has no start."""
    active, _ = without_idle_adapters(model, held)
    return trained_adapters([h for h in active if h.canonical not in reference.tensors])


def _kept_by_run(
    model: nn.Module, held: Sequence[Held], protect: Protection, state: RunState, folders: list[Path], insist: bool
) -> Start:
    """The start that a resumed run has protected so far."""
    if isinstance(protect, Freeze):
        live = capture_reference(model, held, origin=state.reference_origin, gather=True)
        if live.digest != state.reference_digest and not insist:
            raise ValueError(
                "the checkpoint's queries and keys are not the start that the run protected "
                f"({state.reference_origin}): it was changed, or the run was not frozen before. insist=True holds them "
                "where they are now"
            )
        return _start_of(live, protect, state.stage)
    files = [p for f in folders if (p := f / SIDECAR_FOLDER / SIDECAR_FILE).is_file()]
    if not files:
        raise ValueError(
            f"the start that the resumed run protects is gone: no {SIDECAR_FOLDER}/{SIDECAR_FILE} in "
            f"{', '.join(map(str, folders))}. Give reference=PATH of the original model"
        )
    matching = [p for p in files if read_facts(p)["digest"] == state.reference_digest]
    if not matching and not insist:
        raise ValueError(
            f"{files[0]} is not the start that the resumed run protected ({state.reference_origin}); give that one as "
            "reference, or insist=True to go on with this file"
        )
    return _start_of(load_reference((matching or files)[0]), protect, state.stage)


def _refuse_unnamed_stage(model: nn.Module, held: Sequence[Held], previous: RunState | None, live: Start) -> None:
    if previous is not None and previous.reference_digest != live.digest:
        what = (
            f"the model comes from a guarded run ({model_name(model)}, stage {previous.stage}) whose queries and "
            f"keys have moved from the start it protected ({previous.reference_origin})"
        )
    else:
        active, _ = without_idle_adapters(model, held)
        trained = [h for h in trained_adapters(active) if starts_at_zero(model, adapter_of(h))]
        if not trained:
            return
        what = f"the adapter has been trained before ({trained[0]} is not at its zero start)"
    raise ValueError(
        f"{what}. Say which start this stage protects: reference='start' for the weights as they are now, or "
        "reference=PATH of the original start (its sidecar or checkpoint)"
    )


def refuse_changed_settings(
    settings: RunState, output_dir: Path, resumed_from: Path | None, *, insist: bool, required: bool = True
) -> RunState | None:
    """What the resumed run kept of its settings.

    Raises ValueError if there is nothing, or (unless insisted on) if they differ.
    """
    state = next((s for s in map(read_state, _folders(output_dir, resumed_from)) if s is not None), None)
    if resumed_from is not None and (resumed_from / TRAINER_STATE_NAME).is_file():
        state = read_state(resumed_from)  # whole, so a guarded run left its state there; others' lie around it
    if state is None and not required:
        return None
    if state is None:
        raise ValueError(
            f"resuming from {resumed_from or output_dir}, which was made without RouteGuard: its queries and keys may "
            "have moved from their start. Say which start to protect: reference='start' for the weights in the "
            "checkpoint, or reference=PATH of the original model"
        )
    changes = [change for change in state.differences(settings) if not change.startswith("reference_digest")]
    if changes and not insist:
        raise ValueError(
            f"the run is resumed with other settings than it had: {'; '.join(changes)}. Use the earlier ones, or "
            "insist=True to go on with the new ones (another mode than before also needs a checkpoint without "
            "optimizer state)"
        )
    return state


def _folders(output_dir: Path, resumed_from: Path | None) -> list[Path]:
    return [f for f in (resumed_from, output_dir, resumed_from.parent if resumed_from else None) if f is not None]


def _previous_stage(model: nn.Module) -> RunState | None:
    name = model_name(model)
    return read_state(Path(name)) if name is not None and Path(name).is_dir() else None
