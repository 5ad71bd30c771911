"""The drift record of a run as a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from routeguard.cli.main import app
from routeguard.diagnostics.drift_report import drift_report
from routeguard.drift.record import DriftRecord
from routeguard.drift.sample import DriftSample


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record = DriftRecord(tmp_path / "routeguard" / "drift.jsonl", {"mode": "track"})
    for step in range(1, 11):
        factors = {(3, "query"): 0.01 * step, (3, "key"): 0.02 * step, (7, "query"): 0.001 * step}
        record.append([DriftSample(step, factors, {3: (0.1 * step, 0.2), 7: (0.3, 0.4)} if step in (4, 8) else {})])
    return tmp_path


def test_report_of_a_run_folder(run: Path) -> None:
    report = drift_report(run)
    assert report == drift_report(run / "routeguard") == drift_report(run / "routeguard" / "drift.jsonl")
    assert report.layers == (3, 7)
    assert report.series(3, "key") == (list(range(1, 11)), pytest.approx([0.02 * n for n in range(1, 11)]))
    data = report.to_dict()
    assert data["schema_version"] == 1 and data["last_step"] == 10
    assert data["routing_step"] == 8 and data["routing"]["3"] == pytest.approx([0.8, 0.2])
    assert "query 0.1000" in str(report) and "logit form of 2 heads 0.2000 to 0.8000" in str(report)


def test_picture_and_command(run: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", "drift", str(run), "--json", "--plot", str(run / "drift.png")])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["header"]["mode"] == "track"
    assert (run / "drift.png").exists()


def test_errors(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ValueError, match=r"no drift\.jsonl at"):
        drift_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no drift of layer 7, role 'key'"):
        drift_report(run).series(7, "key")
    DriftRecord(tmp_path / "empty" / "drift.jsonl", {})
    with pytest.raises(ValueError, match="holds no step yet"):
        drift_report(tmp_path / "empty")
