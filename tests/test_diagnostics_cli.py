"""`routeguard diagnose …` on the shipped tiny hybrid."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from routeguard.cli.main import app
from routeguard.demo import tasks
from routeguard.demo.model import WEIGHTS, load_model, load_tokenizer

runner = CliRunner()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "needles.txt"
    path.write_text(tasks.needle_sample(600, 6, random.Random(0)).text)
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid with other keys in layer 5."""
    folder = tmp_path_factory.mktemp("tuned")
    model = load_model()
    model.model.layers[5].self_attn.k_proj.weight.data.mul_(-1.0)
    model.save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def test_distance_of_one_model(text: Path, tmp_path: Path) -> None:
    arguments = ["diagnose", "distance", str(WEIGHTS), "--text", str(text), "--tokens", "256", "--sequences", "2"]
    result = runner.invoke(app, [*arguments, "--plot", str(tmp_path / "d.png")])
    assert result.exit_code == 0, result.output
    assert "2 × 256 tokens, 64 queries" in result.output and (tmp_path / "d.png").exists()
    parsed = json.loads(runner.invoke(app, [*arguments, "--json", "--layers", "5"]).stdout)
    assert list(parsed["layers"]) == ["5"] and len(parsed["layers"]["5"]["mean"]) == 4


def test_distance_before_after_restored(text: Path, tuned: Path) -> None:
    arguments = ["diagnose", "distance", str(tuned), "--before", str(WEIGHTS), "--text", str(text), "--tokens", "128"]
    parsed = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    states = {name: state["layers"]["5"]["mean"] for name, state in parsed["states"].items()}
    assert list(states) == ["before", "after", "restored"]
    assert states["restored"] == states["before"] != states["after"]
    assert {row["layer"] for row in parsed["ranking"]} == {2, 5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "is not a folder with a checkpoint"),
        ([str(WEIGHTS), "--text", "/nowhere.txt"], "is not a file"),
        ([str(WEIGHTS), "--tokens", "9999999"], "Ask for less, or give more text"),
        ([str(WEIGHTS), "--layers", "x"], "is not a list of layer indices"),
        ([str(WEIGHTS), "--queries", "3"], "8 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["diagnose", "distance", *arguments])
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output
