"""Decide which start a run protects: fresh, resumed, or a further stage of a guarded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from routeguard.protect.held import Held
from routeguard.protect.modes import Freeze, Protection
from routeguard.restoration.lookup import open_reference
from routeguard.restoration.reference import Reference, capture_reference, load_reference
from routeguard.training.run_state import FOLDER, REFERENCE_FILE, RunState, read_state


@dataclass(frozen=True)
class Start:
    """The protected start values and which guarded stage of these weights the run is."""

    reference: Reference
    stage: int


def find_start(
    wanted: Any,
    model: nn.Module,
    held: Sequence[Held],
    settings: RunState,
    protect: Protection,
    *,
    output_dir: Path,
    resumed_from: Path | None,
    resumed_step: int,
    insist: bool,
) -> Start:
    """The start that a run protects.

    Order: an explicit `wanted` reference; on resume what the run has kept; else the live weights. Settings that a
    resumed run had before are compared with `settings` (whose digest is not looked at).

    Raises:
        ValueError: a resumed run whose settings, start or sidecar do not fit; a further stage that does not say which
            start it protects; a frozen start that differs from the live weights.
    """
    previous = _previous_stage(model)
    stage = 1 if previous is None else previous.stage + 1
    if wanted is not None and not (isinstance(wanted, str) and wanted == "start"):
        reference = open_reference(wanted, model, held)
        if isinstance(protect, Freeze) and reference.digest != _live(model, held).digest:
            raise ValueError(
                "Freeze holds the live weights, but their queries and keys differ from the reference "
                f"({reference.origin}); put them back first with routeguard.restore(model, reference), or use Track() "
                "or Anchor() with restore=QKRestore()"
            )
        return Start(reference, stage)
    if wanted is None and resumed_step > 0:
        return _resumed(model, held, settings, protect, output_dir, resumed_from, insist)
    live = _live(model, held)
    if wanted is None and previous is not None and previous.reference_digest != live.digest:
        raise ValueError(
            f"the model comes from a guarded run ({_name_or_path(model)}, stage {previous.stage}) whose queries and "
            f"keys have moved from the start it protected ({previous.reference_origin}). Say which start this stage "
            "protects: reference='start' for the weights as they are now, or reference=PATH of the original start (its "
            "sidecar or checkpoint)"
        )
    return Start(live, stage)


def _live(model: nn.Module, held: Sequence[Held]) -> Reference:
    return capture_reference(model, held, origin="live weights at the start of training")


def _resumed(
    model: nn.Module,
    held: Sequence[Held],
    settings: RunState,
    protect: Protection,
    output_dir: Path,
    resumed_from: Path | None,
    insist: bool,
) -> Start:
    state = refuse_changed_settings(settings, output_dir, resumed_from, insist=insist)
    if isinstance(protect, Freeze):
        live = _live(model, held)
        if live.digest != state.reference_digest and not insist:
            raise ValueError(
                "the checkpoint's queries and keys are not the start that the run protected "
                f"({state.reference_origin}): it was changed, or the run was not frozen before. insist=True holds them "
                "where they are now"
            )
        return Start(live, state.stage)
    folders = _folders(output_dir, resumed_from)
    kept = [p for f in folders if (p := f / FOLDER / REFERENCE_FILE).is_file()]
    if not kept:
        raise ValueError(
            f"the start that the resumed run protects is gone: no {FOLDER}/{REFERENCE_FILE} in "
            f"{', '.join(map(str, folders))}. Give reference=PATH of the original model"
        )
    reference = load_reference(kept[0])
    if reference.digest != state.reference_digest and not insist:
        raise ValueError(
            f"{kept[0]} is not the start that the resumed run protected ({state.reference_origin}); give that one as "
            "reference, or insist=True to go on with this file"
        )
    return Start(reference, state.stage)


def refuse_changed_settings(
    settings: RunState, output_dir: Path, resumed_from: Path | None, *, insist: bool
) -> RunState:
    """What the resumed run kept of its settings.

    Raises ValueError if there is nothing, or (unless insisted on) if they differ.
    """
    state = next((s for s in map(read_state, _folders(output_dir, resumed_from)) if s is not None), None)
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
    path = Path(_name_or_path(model))
    return read_state(path) if str(path) != "." and path.is_dir() else None


def _name_or_path(model: nn.Module) -> str:
    unwrap: Any = getattr(model, "get_base_model", None)
    base = unwrap() if callable(unwrap) else model
    return str(getattr(getattr(base, "config", None), "_name_or_path", "") or "")
