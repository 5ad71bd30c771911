"""Collect what a guarded run left in its output folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routeguard.checkpoint.sidecar import SIDECAR_FILE, SIDECAR_FOLDER, read_facts
from routeguard.recall.gate import gate
from routeguard.recall.probe_failures import Failures
from routeguard.recall.probe_record import RECORD_FILE
from routeguard.recall.result import RecallResult
from routeguard.report.coverage import find_coverage
from routeguard.report.environment import find_environment
from routeguard.report.findings import find_warnings
from routeguard.report.reading import ProbeRecord, Problems, read_drift_report, read_probe, read_restore, read_training
from routeguard.report.run import RunReport, Verdict
from routeguard.training.run_state import DRIFT_FILE, RESTORE_FILE, STATE_FILE, read_state

STATES = ("before", "after", "restored")
_LOOKED_FOR = (STATE_FILE, DRIFT_FILE, Path(RECORD_FILE).name, RESTORE_FILE, SIDECAR_FILE)


def collect_run(
    folder: str | Path,
    *,
    recall: Mapping[str, RecallResult] | None = None,
    reasoning: tuple[float, float] | None = None,
) -> RunReport:
    """What a guarded run left, and what is given beside it. Loads no model.

    Args:
        folder: the Trainer's output folder.
        recall: results of `measure_recall` by state: "before", "after", "restored" (any of them). Before and after are
            judged by the gate with its defaults, and so are before and restored.
        reasoning: a score of your own before and after.

    Raises:
        ValueError: the folder holds nothing of routeguard's; another state of recall than these three.
    """
    run = Path(folder)
    kept = run / SIDECAR_FOLDER
    given = dict(recall or {})
    strange = [name for name in given if name not in STATES]
    if strange:
        raise ValueError(f"recall of {strange[0]!r} is not understood; give {', '.join(STATES)}")
    if not any((kept / name).is_file() for name in _LOOKED_FOR) and not (run / STATE_FILE).is_file():
        raise ValueError(
            f"{run} holds nothing that RouteGuard or RecallProbe wrote: looked for {', '.join(_LOOKED_FOR)} in {kept}, "
            f"and for {STATE_FILE} in {run}; give the output folder of a guarded run"
        )
    problems = Problems()
    record = run / RECORD_FILE
    state = problems.read(kept if (kept / STATE_FILE).is_file() else run, read_state)
    facts = problems.read(kept / SIDECAR_FILE, read_facts)
    drift = problems.read(kept / DRIFT_FILE, read_drift_report)
    restore = problems.read(kept / RESTORE_FILE, read_restore)
    probe = problems.read(record, read_probe) or ProbeRecord({}, {}, Failures())
    checkpoints = _checkpoints(run)
    states = [path for place in (*checkpoints, run) if (path := place / "trainer_state.json").is_file()]
    training = problems.read(states[0], read_training) if states else None
    order = [run, *checkpoints]
    if facts is not None and state is not None and facts["digest"] != state.reference_digest:
        problems.found.append(f"{SIDECAR_FILE} is left over from an earlier run: it is not the start of this one")
        facts = None
    coverage = None if state is None else find_coverage(state, facts, order)
    if restore is not None and state is not None and state.restore is None:
        problems.found.append(f"{RESTORE_FILE} is left over from an earlier run: this one was not asked to restore")
        restore = None
    return RunReport(
        folder=run,
        state=state,
        coverage=coverage,
        drift=drift,
        restore=restore,
        probed=probe.probed,
        probed_restored=probe.restored,
        failures=probe.failures,
        given={name: given[name] for name in STATES if name in given},
        verdicts=_verdicts(given, reasoning),
        reasoning=reasoning,
        training=training,
        environment=find_environment(state, order, given.get("before")),
        warnings=(*problems.found, *find_warnings(kept, state, drift, restore, probe.probed, probe.failures)),
        notes=_notes(facts, restore, probe.probed, given),
        absent=_absent(state, coverage, drift, restore, probe.probed, given, reasoning, training),
    )


def _checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, the last one first."""
    numbered = [(p.name.removeprefix("checkpoint-"), p) for p in run.glob("checkpoint-*") if p.is_dir()]
    return [path for _, path in sorted(((int(n), p) for n, p in numbered if n.isdigit()), reverse=True)]


def _verdicts(given: Mapping[str, RecallResult], reasoning: tuple[float, float] | None) -> tuple[Verdict, ...]:
    found = []
    for later in ("after", "restored"):
        if "before" in given and later in given:
            name = f"before and {later}"
            try:
                scores = reasoning if later == "after" else None
                found.append(Verdict(name, gate(given["before"], given[later], reasoning=scores)))
            except ValueError as error:
                found.append(Verdict(name, None, str(error)))
    return tuple(found)


def _notes(facts: Any, restore: Any, probed: Mapping[int, RecallResult], given: Mapping[str, RecallResult]) -> Any:
    notes = list(facts["notes"] if facts else ())
    notes += restore.notes if restore is not None else ()
    for result in (*probed.values(), *given.values()):
        notes += result.notes
    return tuple(dict.fromkeys(notes))


def _absent(
    state: Any,
    coverage: Any,
    drift: Any,
    restore: Any,
    probed: Mapping[int, RecallResult],
    given: Mapping[str, RecallResult],
    reasoning: Any,
    training: Any,
) -> tuple[str, ...]:
    parts = (
        (state, f"Settings of the guard: no {STATE_FILE}."),
        (coverage, f"Tensors, rows and parameters: no {STATE_FILE} with them, no whole checkpoint, no kept start."),
        (coverage is None or coverage.share is not None,
         f"Share of the model: no {STATE_FILE} with it, and no whole checkpoint in the folder."),
        (drift, f"Drift: no {DRIFT_FILE}, or no step in it."),
        (restore is not None or state is None or state.restore is None, f"Restore at the end: no {RESTORE_FILE}."),
        (probed, f"Recall during the run: no {RECORD_FILE} with a measurement (RouteGuard(probe=RecallProbe()))."),
        ("before" in given and "after" in given, "Gate: recall before and after was not given."),
        (reasoning, "Reasoning scores: not given."),
        (training, "Steps and losses: no trainer_state.json in the folder or its checkpoints."),
    )  # fmt: skip
    return tuple(text for present, text in parts if not present)
