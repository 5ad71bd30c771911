"""The command line: what is printed, the exit codes, and that bad input ends in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from routeguard import Routes, find_routes
from routeguard.cli.main import app, parse_layers
from routeguard.protect.modes import _AT_END, _PROTECTIONS, _RESTORATIONS
from routeguard.protect.recipes import RECIPES
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
    shutil.copytree(saved, tmp_path / "same")
    same = runner.invoke(app, ["verify", str(tmp_path / "same"), "--against", str(saved)])
    assert same.exit_code == 0, same.output
    itself = runner.invoke(app, ["verify", str(saved), "--against", str(saved)])
    assert itself.exit_code == 2 and "compared with itself" in itself.output
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


def test_commands_are_listed_by_use() -> None:
    lines = runner.invoke(app, ["--help"]).output.split("Commands:")[1].split("\n")
    names = [line.split()[0] for line in lines if line.strip()]
    assert names == [
        "demo", "inspect", "doctor", "restore", "average", "drift", "verify", "undo", "recall", "gate", "diagnose",
        "locality", "report",
    ]  # fmt: skip
    assert not any(line.endswith("...") for line in lines)


def test_every_command_with_a_result_prints_json() -> None:
    commands = [app.commands[name] for name in app.commands if name != "diagnose"]
    commands += list(app.commands["diagnose"].commands.values())  # type: ignore[attr-defined]
    assert all("--json" in [o for p in command.params for o in p.opts] for command in commands)


@pytest.mark.parametrize(
    ("command", "parameter", "names"),
    [
        ("doctor", "protect", _PROTECTIONS),
        ("doctor", "restore", _AT_END),
        ("doctor", "recipe", RECIPES),
        ("restore", "method", _RESTORATIONS),
    ],
)
def test_names_are_completed(command: str, parameter: str, names: Any) -> None:
    asked = next(p for p in app.commands[command].params if p.name == parameter)
    context = click.Context(app.commands[command])
    assert {item.value for item in asked.shell_complete(context, "")} == set(names)
    first = next(iter(names))
    assert [item.value for item in asked.shell_complete(context, first)][:1] == [first]


@pytest.mark.parametrize(
    ("command", "parameter"),
    [("drift", "base"), ("restore", "base"), ("average", "base"), ("recall", "model"), ("doctor", "model")],
)
def test_paths_are_completed(command: str, parameter: str) -> None:
    asked = next(p for p in app.commands[command].params if p.name == parameter)
    assert [item.type for item in asked.shell_complete(click.Context(app.commands[command]), "x")] == ["file"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    code = "import sys; from routeguard.cli.main import app; app(prog_name='routeguard')"
    variable = "_ROUTEGUARD_COMPLETE"
    source = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, variable: f"{shell}_source"}, capture_output=True, text=True
    )
    assert source.returncode == 0 and f"{variable}={shell}_complete" in source.stdout
    asked = {"COMP_WORDS": "routeguard do", "COMP_CWORD": "do" if shell == "fish" else "1"}
    answer = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        env={**os.environ, variable: f"{shell}_complete", **asked},
        capture_output=True,
        text=True,
    )
    assert "doctor" in answer.stdout and "restore" not in answer.stdout
    imported = {
        line.rsplit("|", 1)[-1].strip() for line in answer.stderr.splitlines() if line.startswith("import time")
    }
    assert "click" in imported and not {"torch", "transformers", "rich", "yaml"} & imported


def test_with_json_standard_output_holds_nothing_else(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show_demo(output: Path, **options: object) -> None:
        print("noise")
        output.mkdir()
        (output / "demo.json").write_text('{"rows": []}\n')

    monkeypatch.setattr("routeguard.demo.console.show_demo", show_demo)
    plain = runner.invoke(app, ["demo", "--output", str(tmp_path / "a")])
    assert plain.stdout == "noise\n"
    done = runner.invoke(app, ["demo", "--json", "--output", str(tmp_path / "b")])
    assert json.loads(done.stdout) == {"rows": []} and "noise" in done.stderr

    def from_pretrained(*args: object, **options: object) -> None:
        print("noise")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    loaded = runner.invoke(app, ["recall", str(saved), "--lengths", "64", "--json"])
    assert "noise" in loaded.stderr and "noise" not in loaded.stdout


def test_parse_layers() -> None:
    assert parse_layers(None) is None and parse_layers("3,7") == [3, 7]
