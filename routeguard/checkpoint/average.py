"""`average_checkpoint`: a checkpoint on disk averaged with its start (WiSE-FT), into a copy. No torch."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from routeguard.checkpoint.adapter_base import PART, refuse_other_base
from routeguard.checkpoint.adapter_tensors import adapter_config, aligned
from routeguard.checkpoint.compare import chunk_pairs, num_unequal
from routeguard.checkpoint.in_place import refuse_interrupted
from routeguard.checkpoint.job import Job, facts_of
from routeguard.checkpoint.new_folder import copied_with
from routeguard.checkpoint.patch import Patch
from routeguard.checkpoint.row_plan import Progress, no_progress
from routeguard.checkpoint.same_meaning import compare_meaning
from routeguard.checkpoint.start import Start, open_plain, open_start, read_routes
from routeguard.checkpoint.target import free_place, refuse_base
from routeguard.protect.adapter_inits import ZERO_B_INITS
from routeguard.protect.modes import checked_alpha
from routeguard.restoration.average_report import AverageReport, without_start
from routeguard.storage.floats import Floats, to_bytes, to_bytes_at_random, to_floats
from routeguard.storage.folder import adapter_file, is_adapter_folder, stored_tensors
from routeguard.storage.header import FLOATS, StoredTensor
from routeguard.storage.hub import local_folder
from routeguard.storage.row_bytes import Slice


def average_checkpoint(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    *,
    out: str | PathLike[str],
    alpha: float = 0.1,
    insist: bool = False,
    progress: Progress = no_progress,
) -> AverageReport:
    """Move every weight of a saved checkpoint the fraction `alpha` of the way back: `W ← (1 − α)·W + α·W₀`.

    The method is WiSE-FT (arXiv 2109.01903), whose α counts from the start; ours counts from TUNED. Both checkpoints
    are read twice, a piece at a time; no model is built. 16-bit weights are rounded at random, right on average.
    Killed at any point, there is either no OUT or a whole one.

    Args:
        base: the checkpoint that the tuning started from: a folder, or a model id of the Hub (its cache first).
        tuned: the folder to average: safetensors, one file or sharded; or a LoRA adapter that started at zero, whose
            B is scaled by `1 − alpha`.
        out: a folder to write to; it must not exist.
        alpha: above 0, up to 1 (the start itself). Default 0.1 (measured on tiny hybrids, docs/evidence).
        insist: go on although the two differ in what gives the weights their meaning, BASE lacks some tensors, which
            then stay as tuned, or modules that an adapter acts on. Default: no.
        progress: called with its stage ("comparing" or "copying"), what is done and the total, in bytes.

    Returns:
        An `AverageReport`. The same facts, with hashes, are in `OUT/routeguard/provenance.json`.

    Raises:
        ValueError: not a checkpoint, or not of the same model; quantised or pickled weights; NaN; OUT exists; an
            adapter that did not start at zero, or of another base. Nothing is then written.
        OSError: the disk is full, or may not be written. Nothing is left of OUT.
    """
    alpha = checked_alpha(alpha)
    tuned, target = Path(tuned), Path(out)
    free_place(tuned, target, in_place=False)
    base_folder = local_folder(str(base))
    refuse_base(base_folder, tuned, target)
    refuse_interrupted(tuned)
    start = open_start(base_folder)
    if start.is_sidecar:
        raise ValueError(f"{start.origin} holds the routing rows only; averaging needs the whole start as BASE")
    plan = _plan_adapter if is_adapter_folder(tuned) else _plan_checkpoint
    pieces, notes = plan(tuned, start, alpha, insist)
    prepare = partial(_job, base_folder, tuned, target, start, alpha, pieces, notes, progress)
    return copied_with(tuned, target, prepare, progress)[0].report


@dataclass(frozen=True)
class _Piece:
    """One tensor of TUNED: what it is averaged with (None: zero), and the fraction of the way."""

    tensor: StoredTensor
    start: StoredTensor | None
    alpha: float

    def pairs(self) -> Iterator[tuple[Floats, Floats]]:
        """Tuned and start values, a part at a time, in the wider of float32 and the tuned type."""
        tuned = Slice(self.tensor, None, 0)
        kind = self.tensor.dtype
        if self.start is None:
            for chunk in tuned.chunks():
                values = _wide(to_floats(chunk, kind), kind)
                yield values, np.zeros_like(values)
            return
        for now, before in chunk_pairs(tuned, Slice(self.start, None, 0)):
            yield _wide(to_floats(now, kind), kind), _wide(to_floats(before, self.start.dtype), kind)

    def averaged(self) -> Iterator[bytes]:
        """The new bytes, a part at a time; the same at every call."""
        random = np.random.default_rng(zlib.crc32(self.tensor.name.encode()))
        for tuned, start in self.pairs():
            yield self._new(tuned, start, random)

    def _new(self, tuned: Floats, start: Floats, random: np.random.Generator) -> bytes:
        number = tuned.dtype.type
        with np.errstate(invalid="ignore", over="ignore"):
            mean: Floats = number(1 - self.alpha) * tuned + number(self.alpha) * start
            mean = np.where(tuned == start, tuned, mean)  # what never moved keeps its bits
            return to_bytes_at_random(mean, self.tensor.dtype, random)

    def compare(self) -> _Finding:
        """What averaging it is going to change. The values of TUNED and BASE must be finite."""
        found = _Finding(self.tensor)
        digest = hashlib.sha256()
        random = np.random.default_rng(zlib.crc32(self.tensor.name.encode()))
        for tuned, start in self.pairs():
            new = self._new(tuned, start, random)
            with np.errstate(invalid="ignore", over="ignore"):
                difference = tuned - start
            digest.update(new)
            found.num_changed += num_unequal(to_bytes(tuned, self.tensor.dtype), new, self.tensor.item_bytes)
            found.moved += float(np.dot(difference, difference))
            found.size += float(np.dot(start, start))
            found.finite &= bool(np.isfinite(tuned).all() and np.isfinite(start).all())
        found.sha256 = digest.hexdigest()
        return found


@dataclass
class _Finding:
    """Sums over one tensor: entries changed, ‖W − W₀‖², ‖W₀‖², whether all is finite."""

    tensor: StoredTensor
    num_changed: int = 0
    moved: float = 0.0
    size: float = 0.0
    finite: bool = True
    sha256: str = ""

    def record(self) -> dict[str, Any]:
        """For `provenance.json`."""
        return {
            "tensor": self.tensor.name,
            "file": self.tensor.file.name,
            "dtype": self.tensor.dtype,
            "drift_before": (self.moved / self.size) ** 0.5 if self.size else None,
            "changed_entries": self.num_changed,
            "sha256": self.sha256,
        }


def _wide(values: Floats, dtype: str) -> Floats:
    return values.astype(np.float64 if dtype == "float64" else np.float32, copy=False)


def _plan_checkpoint(tuned: Path, start: Start, alpha: float, insist: bool) -> tuple[list[_Piece], tuple[str, ...]]:
    config, stored = open_plain(tuned)
    notes = (*start.notes, *compare_meaning(tuned, config, read_routes(tuned, config, stored), start, insist=insist))
    floats = {name: tensor for name, tensor in stored.items() if tensor.dtype in FLOATS}
    missing = [name for name, tensor in floats.items() if not _fits(tensor, start.tensors.get(name))]
    notes += without_start(missing, start.origin, insist=insist, total=len(floats))
    if len(floats) < len(stored):
        notes += (f"{len(stored) - len(floats)} tensors that hold no floating-point numbers: left as tuned",)
    return [_Piece(t, start.tensors[name], alpha) for name, t in floats.items() if name not in set(missing)], notes


def _fits(tensor: StoredTensor, start: StoredTensor | None) -> bool:
    return start is not None and start.shape == tensor.shape and start.dtype in FLOATS


def _plan_adapter(tuned: Path, start: Start, alpha: float, insist: bool) -> tuple[list[_Piece], tuple[str, ...]]:
    """A LoRA that started at zero is averaged by scaling its B; what is stored whole is averaged with BASE."""
    config = adapter_config(tuned, start)
    merge = "merge the adapter (merge_and_unload) and average the merged model"
    if str(config.get("peft_type")) != "LORA" or config.get("use_dora"):
        kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
        raise ValueError(f"a {kind} adapter is not linear in one of its tensors: {merge}")
    if config.get("init_lora_weights", True) not in ZERO_B_INITS:
        raise ValueError(f"init_lora_weights={config.get('init_lora_weights')!r} did not start at zero: {merge}")
    stored = aligned(stored_tensors([adapter_file(tuned)]), start.routes)
    if not insist:  # its B is scaled whatever the base calls the modules
        refuse_other_base(stored, start, start.routes)
    pieces, unknown = [], []
    for name, tensor in stored.items():
        part = PART.search(name)
        if part is not None and part["part"] == "lora_B":
            pieces.append(_Piece(tensor, None, alpha))
        elif part is None and _fits(tensor, start.tensors.get(name)):
            pieces.append(_Piece(tensor, start.tensors[name], alpha))
        elif part is None or part["part"] != "lora_A":
            unknown.append(name)
    if unknown and not insist:
        raise ValueError(
            f"{len(unknown)} tensors of {tuned} are neither LoRA's A and B nor in {start.origin}: "
            f"{', '.join(unknown[:4])}; {merge}, or insist (insist=True, --insist) to leave them as tuned"
        )
    if not any(piece.start is None for piece in pieces):
        raise ValueError(f"{tuned} holds no lora_B tensors; {merge}")
    notes = (f"{len(unknown)} tensors that are neither LoRA nor in BASE: left as tuned",) if unknown else ()
    return pieces, (*start.notes, *notes)


def _job(
    base: Path,
    tuned: Path,
    target: Path,
    start: Start,
    alpha: float,
    pieces: Sequence[_Piece],
    notes: tuple[str, ...],
    progress: Progress,
) -> Job[AverageReport]:
    findings, done, total = [], 0, sum(piece.tensor.num_bytes for piece in pieces)
    for piece in pieces:
        progress("comparing", done, total)
        findings.append(piece.compare())
        done += piece.tensor.num_bytes
    bad = [found.tensor.name for found in findings if not found.finite]
    if bad:
        raise ValueError(
            f"NaN or infinite weights in TUNED or BASE: {', '.join(bad[:4])}; a run that diverged cannot be averaged, "
            "use an earlier checkpoint"
        )
    changed = sum(found.num_changed for found in findings)
    size = sum(found.size for found in findings)
    measured = all(piece.start is not None for piece in pieces) and size > 0
    report = AverageReport(
        alpha=alpha,
        origin=start.origin,
        num_tensors=len(pieces),
        num_entries=sum(found.tensor.num_bytes // found.tensor.item_bytes for found in findings),
        drift_before=(sum(found.moved for found in findings) / size) ** 0.5 if measured else None,
        num_16_bit=sum(f.tensor.num_bytes // 2 for f in findings if f.tensor.item_bytes == 2),
        output=str(target),
        notes=notes if changed else (*notes, "nothing changed: every weight already equals its average"),
    )
    facts = facts_of(base, tuned, f"average (alpha {alpha:g})", report.notes, [found.record() for found in findings])
    return Job([Patch(piece.tensor, None, 0, piece.averaged) for piece in pieces], report, facts)
