"""`restore_checkpoint`: put routing back in a checkpoint on disk, into a copy or in place. No torch for QK-Restore."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import routeguard
from routeguard.checkpoint.in_place import patch_in_place, refuse_interrupted, refuse_unsafe_in_place
from routeguard.checkpoint.new_folder import files_to_copy, write_copy
from routeguard.checkpoint.patch import Patch, patched_files
from routeguard.checkpoint.row_plan import (
    Finding,
    Progress,
    RowRestore,
    by_place_notes,
    conversion_notes,
    examine,
    no_progress,
    per_layer,
    plan_rows,
)
from routeguard.checkpoint.start import Start, open_start, refuse_quantised
from routeguard.protect.modes import Interpolate, QKPro, QKRestore, Restoration, as_restoration
from routeguard.restoration.meaning import check_same_meaning, meaning_of_config
from routeguard.restoration.report import RestoreReport, describe_method
from routeguard.routes.collection import ROUTING_ROLES, Role, Routes
from routeguard.routes.heads import Heads, select_heads
from routeguard.routes.resolve import resolve
from routeguard.storage.folder import checkpoint_config, is_adapter, stored_checkpoint
from routeguard.storage.hub import local_folder


@dataclass(frozen=True)
class CheckpointRestore:
    """What `restore_checkpoint` did. `str()` prints it, `to_dict()` is JSON-serialisable.

    Attributes:
        tuned: the folder that was repaired.
        output: where the repaired checkpoint is (the same folder when it was done in place).
        restored: layers, tensors, rows, drift before, changed bytes, notes.
        num_bytes_copied: bytes of the new folder; 0 in place.
        left_out: names in TUNED that did not come along: optimizer state and the like, other checkpoints.
        undo: the file from which `routeguard undo` brings the old bytes back; None for a copy.
    """

    tuned: str
    output: str
    restored: RestoreReport
    num_bytes_copied: int = 0
    left_out: tuple[str, ...] = ()
    undo: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "restored": self.restored.to_dict()}

    def __str__(self) -> str:
        lines = [str(self.restored)]
        if self.left_out:
            lines.append(
                f"note: left out (training state, other checkpoints, what is no file): {', '.join(self.left_out)}"
            )
        if self.undo:
            lines.append(
                f"{self.output} was changed in place; `routeguard undo {self.output}` brings the old bytes back"
            )
        else:
            lines.append(f"wrote {self.output} ({self.num_bytes_copied:,} bytes); {self.tuned} is as it was")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Job:
    """Everything that a restore is about to write and say; making it writes nothing."""

    patches: Sequence[Patch]
    report: RestoreReport
    facts: dict[str, Any]


def restore_checkpoint(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    *,
    out: str | PathLike[str] | None = None,
    in_place: bool = False,
    method: str | Restoration = "qk",
    roles: Iterable[Role] = ROUTING_ROLES,
    layers: Iterable[int] | None = None,
    heads: Heads | None = None,
    norms: bool = False,
    insist: bool = False,
    progress: Progress = no_progress,
) -> CheckpointRestore:
    """Put the queries and keys of the full-attention layers of a saved checkpoint back to their start.

    Every byte that is not routing stays as it is in TUNED: other weights, headers, shards, config, tokenizer. Only
    headers and routing rows are read, no model is built. Killed at any point, there is either no OUT or a whole one.

    Args:
        base: the checkpoint that the tuning started from: a folder, a model id of the Hub (its cache first), or what
            a guarded run kept (its folder, or `reference.safetensors`).
        tuned: the folder to repair: safetensors, one file or sharded; a PEFT adapter; a `checkpoint-N` of Trainer.
        out: a folder to write the repaired checkpoint to; it must not exist.
        in_place: change TUNED itself, keeping the old rows in `TUNED/routeguard/undo.safetensors`. Default: no.
        method: "qk" (QK-Restore, the paper's Algorithm 1), "qk_pro" (ridge form, §7.4), "interpolate", or one of the
            objects `QKRestore()`, `QKPro(ridge=…)`, `Interpolate(alpha=…)`. Default "qk".
        roles: "query", "key", and for ablations "value" and "output". Default: query and key.
        layers: only these decoder layers. Default: every full-attention layer.
        heads: only these query heads and the key heads that serve them, `{layer: [heads]}`. Default: all.
        norms: also the gains of query and key norms. Default: no (as in the paper).
        insist: go on although the two differ in what gives the weights their meaning. Default: no.
        progress: called as the work goes, with its stage ("comparing", "computing" or "copying"), what is done, and
            the total: bytes, or layers when computing. Default: nothing.

    Returns:
        A `CheckpointRestore`. The same facts, with hashes, are in `OUT/routeguard/provenance.json`.

    Raises:
        ValueError: not a checkpoint, or not of the same model; quantised or pickled weights; NaN; OUT exists; links
            where in-place writing would reach further; a method that is not defined there. Nothing is then written.
        OSError: the disk is full, or may not be written. Nothing is left of OUT, and TUNED is as it was.
    """
    mode = as_restoration(method)
    if mode is None:
        raise ValueError("method=None restores nothing; choose 'qk', 'qk_pro' or 'interpolate'")
    tuned = Path(tuned)
    target = _checked_target(tuned, None if out is None else Path(out), in_place=in_place)
    base_folder = local_folder(str(base))
    if base_folder.is_dir() and base_folder.resolve() == tuned.resolve():
        raise ValueError(f"BASE and TUNED are the same folder, {tuned}: there is nothing to bring back from it")
    if base_folder.is_dir():
        refuse_interrupted(base_folder)
    job = _plan(base_folder, tuned, mode, tuple(_listed(roles)), layers, heads, norms, insist, progress)
    if target is None:
        refuse_unsafe_in_place(tuned, patched_files(job.patches))
        undo = patch_in_place(tuned, job.patches, job.facts)
        return CheckpointRestore(str(tuned), str(tuned), job.report, undo=str(undo))
    refuse_interrupted(tuned)
    files, left_out = files_to_copy(tuned)
    total = sum((tuned / file).stat().st_size for file in files)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("copying", done, total)

    write_copy(tuned, target, job.patches, job.facts, advance)
    return CheckpointRestore(str(tuned), str(target), job.report, total, tuple(left_out))


def _checked_target(tuned: Path, out: Path | None, *, in_place: bool) -> Path | None:
    """Where to write; None is in place. Raises ValueError for a place that would lose something."""
    if not tuned.is_dir():
        raise ValueError(f"{tuned} is not a folder with a checkpoint or an adapter")
    if in_place == (out is not None):
        raise ValueError("give either out=FOLDER (--out) for a repaired copy, or in_place=True (--in-place)")
    if out is None:
        return None
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already; choose another folder, nothing is overwritten")
    if out.resolve().is_relative_to(tuned.resolve()):
        raise ValueError(f"{out} lies inside {tuned}, which is being copied; choose a folder outside")
    return out


def _plan(
    base: Path,
    tuned: Path,
    mode: Restoration,
    roles: tuple[Role, ...],
    layers: Iterable[int] | None,
    heads: Heads | None,
    norms: bool,
    insist: bool,
    progress: Progress,
) -> _Job:
    if is_adapter(tuned):
        from routeguard.checkpoint.adapter_rows import plan_adapter

        if heads is not None:
            raise ValueError(
                "heads= is for whole weights: merge the adapter (merge_and_unload), restore the merged model"
            )
        patches, report, records = plan_adapter(tuned, open_start(base), mode, roles, layers, norms)
        return _Job(patches, report, _facts(base, tuned, report, records))
    config = checkpoint_config(tuned)
    refuse_quantised(tuned, config)
    stored = stored_checkpoint(tuned)
    with warnings.catch_warnings():  # a pure softmax model is worth a note here, not a warning
        warnings.simplefilter("ignore", UserWarning)
        routes = resolve(config, stored, roles=roles, norms=norms, layers=layers)
    if heads is not None:
        routes = select_heads(routes, heads)
    start = open_start(base)
    meaning_notes = _compare_meaning(config, stored, routes, start, insist=insist)
    rows = plan_rows(stored, routes, start)
    findings = examine(rows, progress)
    patches, findings, method_notes = _patches(rows, findings, routes, mode, progress)
    notes = [*meaning_notes, *by_place_notes(rows), *conversion_notes(rows), *method_notes]
    if not any(finding.num_changed for finding in findings):
        notes.append("nothing had moved: every row already equals what was written")
    report = RestoreReport(describe_method(mode, routes), start.origin, per_layer(rows, findings), tuple(notes))
    return _Job(patches, report, _facts(base, tuned, report, _tensor_facts(rows, findings)))


def _compare_meaning(
    config: dict[str, Any], stored: dict[str, Any], routes: Routes, start: Start, *, insist: bool
) -> tuple[str, ...]:
    """The facts of the whole model, whatever layers were chosen."""
    whole = resolve(config, stored)
    return check_same_meaning(meaning_of_config(config, whole), start.meaning, insist=insist)


def _patches(
    rows: Sequence[RowRestore], findings: list[Finding], routes: Routes, mode: Restoration, progress: Progress
) -> tuple[list[Patch], list[Finding], tuple[str, ...]]:
    if isinstance(mode, (QKPro, Interpolate)):
        from routeguard.checkpoint.computed_rows import compute_rows

        return compute_rows(rows, findings, routes, mode, progress)
    assert isinstance(mode, QKRestore)
    return (
        [Patch(row.tuned.tensor, row.tuned.rows, row.tuned.dim, partial(_start_of, row)) for row in rows],
        findings,
        (),
    )


def _start_of(row: RowRestore) -> Iterable[bytes]:
    return row.start_chunks()


def _tensor_facts(rows: Sequence[RowRestore], findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "layer": row.route.layer,
            "role": row.route.role,
            "kind": row.route.kind,
            "tensor": row.tuned.tensor.name,
            "file": row.tuned.tensor.file.name,
            "rows": row.tuned.rows,
            "dim": row.tuned.dim,
            "dtype": row.tuned.tensor.dtype,
            "from_tensor": row.start.tensor.name,
            "from_dtype": row.start.tensor.dtype,
            "drift_before": (finding.moved / finding.size) ** 0.5 if finding.size else None,
            "changed_entries": finding.num_changed,
            "sha256": finding.sha256,
        }
        for row, finding in zip(rows, findings, strict=True)
    ]


def _facts(base: Path, tuned: Path, report: RestoreReport, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "routeguard": routeguard.__version__,
        "method": report.method,
        "base": str(base),
        "tuned": str(tuned),
        "notes": list(report.notes),
        "tensors": tensors,
    }


def _listed(roles: Iterable[Role]) -> Iterable[Role]:
    return (roles,) if isinstance(roles, str) else roles  # type: ignore[return-value]
