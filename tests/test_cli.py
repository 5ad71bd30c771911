"""The command line: what is printed, the exit codes, and that bad input ends in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from routeguard import Routes, find_routes
from routeguard.cli.main import app, parse_layers
from tests.loops import tiny
from tests.zoo.build import build

runner = CliRunner()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("lfm2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_inspect_prints_the_table(saved: Path) -> None:
    result = runner.invoke(app, ["inspect", str(saved)])
    assert result.exit_code == 0
    assert result.output.strip() == str(find_routes(saved))
    for name in find_routes(saved).parameters:
        assert name in result.output


def test_inspect_json_round_trips(saved: Path) -> None:
    result = runner.invoke(app, ["inspect", str(saved), "--json", "--layers", "5", "--norms"])
    assert Routes.from_json(result.output) == find_routes(saved, layers=[5], norms=True)


def test_inspect_needs_no_torch(saved: Path) -> None:
    code = (
        "import sys; from routeguard.cli.main import app\n"
        f"try: app(['inspect', {str(saved)!r}])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "layer 5" in done.stdout


def test_verify(saved: Path, tmp_path: Path) -> None:
    same = runner.invoke(app, ["verify", str(saved), "--against", str(saved)])
    assert same.exit_code == 0, same.output
    moved = tiny("lfm2")
    with torch.no_grad():
        moved.model.layers[5].self_attn.k_proj.weight[3, 1] += 1.0
    moved.save_pretrained(tmp_path / "moved")
    different = runner.invoke(app, ["verify", str(tmp_path / "moved"), "--against", str(saved)])
    assert different.exit_code == 1
    assert "model.layers.5.self_attn.k_proj.weight" in different.output
    as_json = runner.invoke(app, ["verify", str(tmp_path / "moved"), "--against", str(saved), "--json"])
    assert json.loads(as_json.output)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nowhere"], "is not a folder"),
        (["inspect", "{saved}", "--layers", "4"], "no full attention"),
        (["inspect", "{saved}", "--layers", "a,b"], "not a list of layer indices"),
        (["verify", "{saved}", "--against", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, saved: Path) -> None:
    result = runner.invoke(app, [a.format(saved=saved) for a in arguments])
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output
    assert result.output.startswith("routeguard: ")


def test_help_lists_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("inspect", "verify", "demo"))


def test_parse_layers() -> None:
    assert parse_layers(None) is None and parse_layers("3,7") == [3, 7]
