"""The drift file: appended, resumed, read back, and robust against a killed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from routeguard.drift.record import DriftRecord, read_drift
from routeguard.drift.sample import DriftSample


def sample(step: int) -> DriftSample:
    routing = {2: (0.5, 0.25)} if step % 2 == 0 else {}
    return DriftSample(step, {(2, "query"): step / 10, (2, "key"): step / 20}, routing)


def test_round_trip(tmp_path: Path) -> None:
    record = DriftRecord(tmp_path / "deep" / "drift.jsonl", {"protect": {"mode": "track"}})
    record.append([sample(1), sample(2)])
    record.append([])
    record.append([sample(3)])
    header, samples = read_drift(record.path)
    assert header == {"schema_version": 1, "protect": {"mode": "track"}}
    assert samples == [sample(1), sample(2), sample(3)]
    assert samples[0].of_role("query") == 0.1 and samples[0].of_role("value") is None


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    DriftRecord(path, {}).append([sample(1), sample(2), sample(3)])
    DriftRecord(path, {}, resume_step=2).append([sample(3), sample(4)])
    assert [s.step for s in read_drift(path)[1]] == [1, 2, 3, 4]


def test_a_fresh_run_moves_the_old_series_aside(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    for step in (1, 2, 3):
        DriftRecord(path, {}).append([sample(step)])
    for name, step in (("drift.1.jsonl", 1), ("drift.2.jsonl", 2), ("drift.jsonl", 3)):
        assert [s.step for s in read_drift(tmp_path / name)[1]] == [step]


def test_a_half_written_last_line_is_skipped_and_a_damaged_middle_is_not(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    DriftRecord(path, {}).append([sample(1), sample(2)])
    whole = path.read_text()
    path.write_text(whole + '{"step": 3, "dr')
    assert [s.step for s in read_drift(path)[1]] == [1, 2]
    DriftRecord(path, {}, resume_step=2).append([sample(3)])
    assert [s.step for s in read_drift(path)[1]] == [1, 2, 3]
    lines = whole.splitlines()
    path.write_text("\n".join([lines[0], "{", lines[2]]))
    with pytest.raises(ValueError, match="line 2 is damaged"):
        read_drift(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "drift.jsonl"
    path.write_text(json.dumps({"schema_version": 99}) + "\n")
    with pytest.raises(ValueError, match="schema version 99, this version reads 1"):
        read_drift(path)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    DriftRecord(tmp_path / "drift.jsonl", {}).append([sample(1)])
    code = (
        "import sys; from pathlib import Path; from routeguard.drift.record import read_drift\n"
        f"assert read_drift(Path({str(tmp_path / 'drift.jsonl')!r}))[1][0].step == 1\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sample_reads_as_one_line() -> None:
    factors = {(2, "query"): 0.1, (5, "query"): 0.3, (2, "key"): 0.0, (5, "key"): 0.01234567}
    assert str(DriftSample(7, factors)) == "query 0.2, key 0.006173; largest 0.3 (layer 5 query), step 7"
    assert str(DriftSample(1, dict.fromkeys(factors, 0.0))) == "query 0, key 0, step 1"
    assert str(DriftSample(1, {})) == "nothing measured, step 1"
