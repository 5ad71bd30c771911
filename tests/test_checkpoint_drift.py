"""`checkpoint_drift`: against plain float64 arithmetic, the meter's logit form, and the bytes that it reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from routeguard import checkpoint_drift, find_routes
from routeguard.drift.meter import track
from tests.folders import routing_mask, write_pair
from tests.tuned import route_values
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")
FAMILIES = ["qwen3_next", "lfm2", "gpt2", "phi3", "falcon", "llama/bias", "deepseek_v3", "zamba2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_drift_is_that_of_plain_arithmetic(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    start, tuned = write_pair(name, tmp_path, tuned_shards="60KB", dtype=dtype)
    found = checkpoint_drift(tmp_path / "base", tmp_path / "tuned")
    routes = find_routes(start)
    by_place = {(route.parameter, route.role): route for route in routes}
    assert len(found.tensors) == len(routes) == len(by_place)
    for entry in found.tensors:
        route = by_place[entry.tensor, entry.role]
        old, new = (route_values(model, route).double().movedim(route.dim, 0) for model in (start, tuned))
        assert (entry.layer, entry.role, entry.kind) == (route.layer, route.role, route.kind)
        if not old.any():
            assert entry.drift is None
            continue
        assert entry.drift == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)
        geometry = routes.geometry_of(route)
        heads = geometry.num_heads if route.role == "query" else geometry.num_key_value_heads
        if entry.heads:
            assert len(entry.heads) == heads
            expected = [
                float((b - a).norm() / a.norm()) for a, b in zip(old.chunk(heads), new.chunk(heads), strict=True)
            ]
            assert entry.heads == pytest.approx(expected, rel=1e-4)
        else:
            assert name in {"deepseek_v3", "zamba2"}, "only rows that are not grouped by heads go without"
        assert entry.num_changed_rows == entry.num_rows == route.num_rows


@pytest.mark.parametrize("name", ["lfm2", "gpt2", "phi3", "llama/bias"])
def test_the_logit_form_is_the_meters(name: str, tmp_path: Path) -> None:
    start, tuned = write_pair(name, tmp_path)
    found = checkpoint_drift(tmp_path / "base", tmp_path / "tuned", routing=True)
    routes = find_routes(start)
    meter = track(start, routes)
    with torch.no_grad():
        for parameter, other in zip(start.parameters(), tuned.parameters(), strict=True):
            parameter.copy_(other)
    meter.measure(1)
    expected = meter.read()[-1]
    if name == "lfm2":  # normalised queries and keys: factors only
        assert not found.routing and any("normalised" in note for note in found.notes)
        return
    assert set(found.routing) == set(expected.routing) != set()
    for layer, values in found.routing.items():
        assert values == pytest.approx(tuple(expected.routing[layer]), rel=1e-4)


def test_what_did_not_move_is_zero_and_rows_are_counted(tmp_path: Path) -> None:
    start, _ = write_pair("qwen3_next", tmp_path)
    shutil.rmtree(tmp_path / "tuned")
    (route,) = find_routes(start, roles=("query",))
    with torch.no_grad():
        dict(start.named_parameters())[route.parameter][route.rows[0][0] + 2] += 1.0
        dict(start.named_parameters())[route.parameter][route.rows[0][1] + 2] += 1.0  # an output-gate row
    start.save_pretrained(tmp_path / "tuned")
    found = {entry.role: entry for entry in checkpoint_drift(tmp_path / "base", tmp_path / "tuned").tensors}
    assert found["key"].drift == 0.0 and found["key"].num_changed_rows == 0
    assert found["query"].num_changed_rows == 1
    assert [value > 0 for value in found["query"].heads] == [True] + [False] * (len(found["query"].heads) - 1)
    same = checkpoint_drift(tmp_path / "base", tmp_path / "base")
    assert "nothing has moved" in str(same)


def test_only_routing_bytes_are_read(tmp_path: Path) -> None:
    """Everything else may be torn out of the files: the answer stays, and the count is that of the routing bytes."""
    write_pair("qwen3_next", tmp_path)
    expected = checkpoint_drift(tmp_path / "base", tmp_path / "tuned")
    routing = 0
    for side in ("base", "tuned"):
        file = tmp_path / side / "model.safetensors"
        mask = routing_mask(file, find_routes(tmp_path / side))
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        for at in range(start, len(data)):
            if not mask[at]:
                data[at] = 0xFF  # NaN, wherever a float is read
        file.write_bytes(data)
        routing += int(mask.sum())
    found = checkpoint_drift(tmp_path / "base", tmp_path / "tuned")
    assert found.tensors == expected.tensors and found.num_bytes_read == routing


def test_renamed_and_other_models(tmp_path: Path) -> None:
    build("gemma3_text").save_pretrained(tmp_path / "text")
    build("gemma3").save_pretrained(tmp_path / "wrapped")
    found = checkpoint_drift(tmp_path / "text", tmp_path / "wrapped")
    assert any("matched by layer and role" in note for note in found.notes)
    build("lfm2").save_pretrained(tmp_path / "lfm2")
    with pytest.raises(ValueError, match="differ in what gives queries and keys"):
        checkpoint_drift(tmp_path / "lfm2", tmp_path / "wrapped")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"Merge it first \(with peft: AutoPeftModelForCausalLM.*adapter'\)\.merge_and_unload"
    ):
        checkpoint_drift(tmp_path / "lfm2", tmp_path / "adapter")
    with pytest.raises(ValueError, match="is not a folder"):
        checkpoint_drift(tmp_path / "lfm2", tmp_path / "nothing")


def test_the_plot_shows_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_pair("qwen3_next", tmp_path)
    found = checkpoint_drift(tmp_path / "base", tmp_path / "tuned")
    figure = found.plot()
    titles = [axis.get_title() for axis in figure.axes]
    assert {"query heads", "key heads", "whole layers"} <= set(titles)
    image = next(axis for axis in figure.axes if axis.get_title() == "query heads").get_images()[0]
    entry = next(e for e in found.tensors if e.role == "query")
    assert image.get_array().reshape(-1).tolist() == pytest.approx(list(entry.heads))
    figure.savefig(tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 5_000


# -- command line ------------------------------------------------------------------------------------------------------


def run(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "routeguard.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == expect, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def test_the_commands_end_to_end(tmp_path: Path) -> None:
    write_pair("qwen3_next", tmp_path, tuned_shards="300KB")
    base, tuned, out = tmp_path / "base", tmp_path / "tuned", tmp_path / "out"
    assert "restored 2 tensors in 1 layers with QK-Restore" in run("restore", base, tuned, "--out", out).stdout
    assert "OK: every row equals its start" in run("verify", out, "--against", base).stdout
    run("verify", tuned, "--against", base, expect=1)
    table = run("drift", base, tuned).stdout
    assert "relative drift of query and key rows" in table
    assert "relative drift of value rows" in run("drift", base, tuned, "--roles", "value").stdout
    assert "nothing has moved" in run("drift", base, out).stdout
    report = json.loads(run("drift", base, tuned, "--json").stdout)
    assert report["schema_version"] == 1 and len(report["tensors"]) == 2
    pro = tmp_path / "pro"
    found = json.loads(
        run("restore", base, tuned, "--out", pro, "--method", "qk_pro", "--ridge", "0.5", "--json").stdout
    )
    assert found["schema_version"] == 1
    assert found["restored"]["method"] == "QK-Pro (ridge 0.5)" and found["output"] == str(pro)
    assert "routeguard undo" in run("restore", base, tuned, "--in-place").stdout
    assert "routeguard undo" in run("restore", base, tuned, "--in-place", expect=2).stderr
    assert "are back" in run("undo", tuned).stdout
    assert run("restore", base, tuned, "--out", tmp_path / "quiet", "--quiet", "--roles", "query").stdout == ""
    run("drift", base, tuned, "--plot", tmp_path / "drift.png")
    assert (tmp_path / "drift.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["restore", "base", "tuned"], "give either out=FOLDER (--out)"),
        (["restore", "base", "tuned", "--out", "base"], "exists already"),
        (["restore", "base", "tuned", "--out", "x", "--method", "qk_por"], "closest 'qk_pro'"),
        (["restore", "base", "tuned", "--out", "x", "--alpha", "0.5"], "--alpha belongs to --method interpolate"),
        (["restore", "base", "tuned", "--out", "x", "--ridge", "0.5"], "--ridge belongs to --method qk_pro"),
        (["restore", "base", "tuned", "--out", "x", "--roles", "querry"], "choose from query, key"),
        (["restore", "base", "tuned", "--out", "x", "--layers", "a"], "is not a list of layer indices"),
        (["restore", "nowhere", "tuned", "--out", "x"], "nowhere does not exist"),
        (["drift", "base", "nowhere"], "is not a folder"),
        (["undo", "tuned"], "was not restored in place"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from routeguard.cli.main import app

    monkeypatch.chdir(tmp_path)
    write_pair("lfm2", tmp_path)
    result: Any = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


def test_progress_is_reported_stage_by_stage(tmp_path: Path) -> None:
    from routeguard import restore_checkpoint

    write_pair("llama", tmp_path, tuned_shards="60KB")
    seen: list[tuple[str, int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))

    options: dict[str, Any] = {"method": "qk_pro", "progress": progress}
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", **options)
    assert {stage for stage, _, _ in seen} == {"comparing", "computing", "copying"}  # copying goes on beside the others
    for name in ("comparing", "computing", "copying"):
        steps = [done for stage, done, _ in seen if stage == name]
        assert len(steps) > 1 and steps == sorted(steps)
    copied = sum(path.stat().st_size for path in (tmp_path / "tuned").iterdir())
    assert ("copying", copied, copied) in seen
    seen.clear()
    checkpoint_drift(tmp_path / "base", tmp_path / "tuned", progress=progress)
    assert {stage for stage, _, _ in seen} == {"reading"} and len(seen) > 1


def test_the_bar_appears_on_a_terminal_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from routeguard.cli import checkpoints

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for shown, seconds, expected in ((True, 2.0, True), (True, 0.1, False), (False, 2.0, False)):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with checkpoints._ProgressBar(shown=shown) as bar:
            bar.started -= seconds
            bar("copying", 1, 2)
            bar("copying", 2, 2)
        assert ("copying" in screen.getvalue()) is expected
