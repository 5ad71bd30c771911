"""What a probe has measured, on disk: `OUTPUT/routeguard/recall.jsonl`, a header line and a line a measurement."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

from routeguard.recall.probe_failures import Failure
from routeguard.recall.result import RecallResult
from routeguard.storage.aside import move_aside

SCHEMA_VERSION = 1
RECORD_FILE = "routeguard/recall.jsonl"  # inside the Trainer's output folder


def begin_record(
    path: Path, settings: dict[str, Any], *, resume_step: int, limited: bool = False, insist: bool = False
) -> dict[int, float]:
    """Start a record, or go on with the one of the same run up to `resume_step`; another run's is moved aside.

    Returns the first accuracies of the run by length; empty for a fresh one. Warns where a resumed run asks otherwise
    than its record did, so that its drops are counted from another measurement.

    Args:
        path: the record.
        settings: what is asked now.
        resume_step: the step that the run goes on from; 0 for a fresh run.
        limited: whether the probe acts on drops (`max_drop`); then such a run is refused,
        insist: unless this is True.

    Raises ValueError for that.
    """
    begun = _first_result(path) if resume_step else None
    changes = {} if begun is None else changed_settings(begun.settings, settings)
    text = "; ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in changes.items())
    if changes and limited and not insist:
        raise ValueError(
            f"the run that is resumed was probed otherwise ({path}): {text}. max_drop would be counted from a new "
            f"first measurement at step {resume_step}; give the settings of then, leave max_drop out, or insist=True"
        )
    first = {} if begun is None or changes else _accuracies(begun)
    kept: list[str] = []
    if first:
        for line in path.read_text(encoding="utf-8").splitlines()[1:]:
            try:
                if json.loads(line)["step"] < resume_step:  # that step itself is measured again
                    kept.append(line)
            except (json.JSONDecodeError, KeyError):
                continue  # the half-written end of a killed run
    else:
        aside = move_aside(path)
        if changes or (limited and resume_step):
            why = f"was probed otherwise ({text})" if changes else f"has no measurement in {path}"
            kept_as = "" if aside is None else f" its record is kept as {aside};"
            warnings.warn(
                f"the run that is resumed {why};{kept_as} drops are now counted from the first measurement of this "
                f"run, at step {resume_step}",
                stacklevel=2,
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"schema_version": SCHEMA_VERSION, "settings": settings})
    path.write_text("\n".join([header, *kept]) + "\n", encoding="utf-8")
    return first


def append_record(path: Path, step: int, seconds: float, result: RecallResult, *, restored: bool = False) -> None:
    """Write one measurement."""
    line = {"step": step, "seconds": round(seconds, 3), "restored": restored, "result": result.to_dict()}
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def append_failure(path: Path, failure: Failure) -> None:
    """Write down that a measurement failed; where even that fails, the training's end and its log still tell."""
    line = {"step": failure.step, "restored": failure.restored, "failed": failure.reason}
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def read_recall(path: str | Path, *, restored: bool = False) -> dict[int, RecallResult]:
    """Results by step from `OUTPUT/routeguard/recall.jsonl`; a half-written last line is skipped. `restored`: what was
    measured after a restore at the end, instead. Failed ones (lines with "failed", the reason) are left out.

    Raises ValueError for another schema version or a damaged file.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = {}
    for number, line in enumerate(lines):
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            if number and number == len(lines) - 1:
                break
            raise ValueError(f"{path}, line {number + 1} is damaged") from None
        if number == 0:
            if data.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"{path} has schema version {data.get('schema_version')}, this reads {SCHEMA_VERSION}")
        elif data["restored"] == restored and "failed" not in data:
            found[int(data["step"])] = RecallResult.from_dict(data["result"])
    return found


def recorded_settings(record: Path) -> dict[str, Any] | None:
    """What the run asked whose record that is (`tasks`, `lengths`, `num_samples`, …); None if that cannot be read."""
    try:
        with record.open(encoding="utf-8") as stream:
            settings = json.loads(stream.readline())["settings"]
        number, lengths, tasks = settings["num_samples"], settings["lengths"], settings["tasks"]
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
    whole = isinstance(lengths, list) and isinstance(tasks, list) and lengths and tasks
    numbers = [number, *lengths] if whole else []
    return settings if numbers and all(isinstance(n, int) and n > 0 for n in numbers) else None


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings by name that are not the same, as they were and as they are."""
    new = json.loads(json.dumps(new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # Earlier records name the built-in prose even where no task uses a haystack.
    return {n: (old.get(n), new.get(n)) for n in names if not (n == "haystack" and new.get(n) is None)}


def _first_result(record: Path) -> RecallResult | None:
    """What a run measured first; None if there is nothing."""
    results = read_recall(record) if record.is_file() else {}
    return results[min(results)] if results else None


def _accuracies(result: RecallResult) -> dict[int, float]:
    return {int(cell.label[0]): cell.accuracy for cell in result.by_length()}
