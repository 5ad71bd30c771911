"""The drift series on disk: one JSON line a step, a header line first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from routeguard.drift.sample import DriftSample
from routeguard.storage.aside import move_aside
from routeguard.storage.durable import written_beside

SCHEMA_VERSION = 1


class DriftRecord:
    """Appends drift samples to a JSONL file.

    The first line is a header: `{"schema_version": 1, ...}`. Each other line is one optimizer step:
    `{"step": 12, "drift": {"3": {"query": 0.01, "key": 0.02}}, "routing": {"3": [one number a query head]}}`;
    "routing" is there at log steps only.

    Args:
        path: the file; its folder is made.
        header: facts about the run, JSON-serialisable.
        resume_step: keep what an earlier part of the same run wrote up to this step (0: start afresh; what another run
            left there is moved aside to `drift.<n>.jsonl`).
    """

    def __init__(self, path: Path, header: dict[str, Any], *, resume_step: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _kept_lines(path, resume_step)
        if not lines:
            move_aside(path)
        head = json.dumps({"schema_version": SCHEMA_VERSION, **header})
        with written_beside(path) as beside:
            beside.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")

    def append(self, samples: Iterable[DriftSample]) -> None:
        """Write samples and flush them to the operating system."""
        lines = [json.dumps(_as_line(sample)) for sample in samples]
        if lines:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write("\n".join(lines) + "\n")


def read_drift(path: Path) -> tuple[dict[str, Any], list[DriftSample]]:
    """Header and samples of a drift file. A half-written last line (a killed run) is skipped.

    Raises ValueError for another schema version or a file without a header.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0]) if lines else {}
    if header.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {header.get('schema_version')}, this version reads {SCHEMA_VERSION}"
        )
    samples = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            samples.append(_from_line(json.loads(line)))
        except (json.JSONDecodeError, KeyError) as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is damaged: {error}") from None
    return header, samples


def _as_line(sample: DriftSample) -> dict[str, Any]:
    drift: dict[str, dict[str, float]] = {}
    for (layer, role), value in sample.factors.items():
        drift.setdefault(str(layer), {})[role] = value
    line: dict[str, Any] = {"step": sample.step, "drift": drift}
    if sample.routing:
        line["routing"] = {str(layer): list(heads) for layer, heads in sample.routing.items()}
    return line


def _from_line(line: dict[str, Any]) -> DriftSample:
    factors = {(int(layer), role): value for layer, roles in line["drift"].items() for role, value in roles.items()}
    routing = {int(layer): tuple(heads) for layer, heads in line.get("routing", {}).items()}
    return DriftSample(line["step"], factors, routing)


def _kept_lines(path: Path, resume_step: int) -> list[str]:
    if resume_step <= 0 or not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        try:
            if json.loads(line)["step"] <= resume_step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue  # the half-written end of a killed run
    return kept
