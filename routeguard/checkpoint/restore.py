"""`restore_checkpoint`: put routing back in a checkpoint on disk, into a copy or in place. No torch for QK-Restore."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from routeguard.checkpoint.in_place import patch_in_place, refuse_interrupted, refuse_unsafe_in_place
from routeguard.checkpoint.job import Choice, open_job
from routeguard.checkpoint.new_folder import copied_with
from routeguard.checkpoint.patch import patched_files
from routeguard.checkpoint.row_plan import Progress, no_progress
from routeguard.checkpoint.target import free_place, refuse_base
from routeguard.protect.modes import Restoration, as_restoration
from routeguard.restoration.report import RestoreReport
from routeguard.routes.collection import ROUTING_ROLES, Role
from routeguard.routes.heads import Heads
from routeguard.routes.resolve import check_roles
from routeguard.routes.wording import as_printed
from routeguard.storage.hub import local_folder

SCHEMA_VERSION = 1


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
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "restored": self.restored.to_dict()}

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

    _repr_pretty_ = as_printed


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
            the total: bytes, or layers when computing. Copying is reported from a thread. Default: nothing.

    Returns:
        A `CheckpointRestore`. The same facts, with hashes, are in `OUT/routeguard/provenance.json`.

    Raises:
        ValueError: not a checkpoint, or not of the same model; quantised or pickled weights; NaN; OUT exists; links
            where in-place writing would reach further; a method that is not defined there. Nothing is then written.
        OSError: the disk is full, or may not be written. Nothing is left of OUT, and TUNED is as it was.
    """
    mode = as_restoration(method)
    tuned = Path(tuned)
    target = free_place(tuned, None if out is None else Path(out), in_place=in_place)
    base_folder = local_folder(str(base))
    refuse_base(base_folder, tuned, target)
    choice = Choice(mode, check_roles(roles), layers, heads, norms, insist)
    prepare = open_job(base_folder, tuned, choice, progress)
    if target is None:
        job = prepare()
        refuse_unsafe_in_place(tuned, patched_files(job.patches))
        undo = patch_in_place(tuned, job.patches, job.facts)
        return CheckpointRestore(str(tuned), str(tuned), job.report, undo=str(undo))
    refuse_interrupted(tuned)
    job, total, left_out = copied_with(tuned, target, prepare, progress)
    return CheckpointRestore(str(tuned), str(target), job.report, total, left_out)
