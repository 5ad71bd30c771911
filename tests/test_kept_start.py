"""What a run leaves in `routeguard/`, given as the start of a command that reads checkpoints on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from routeguard import RouteGuard
from routeguard.checkpoint.average import average_checkpoint
from routeguard.checkpoint.drift import checkpoint_drift
from routeguard.checkpoint.verify import verify_checkpoint
from tests.loops import tiny
from tests.trainers import run


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model before a run that keeps every weight, and the run's folder with the model after it."""
    base, output = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("pulled")
    model = tiny("lfm2")
    model.save_pretrained(base)
    run(model, output, RouteGuard(recipe="balanced"), max_steps=2)
    model.save_pretrained(output)
    return base, output


def test_the_whole_start_that_a_run_kept_serves_as_base(pulled: tuple[Path, Path], tmp_path: Path) -> None:
    base, tuned = pulled
    kept = tuned / "routeguard" / "start.safetensors"
    report = average_checkpoint(kept, tuned, out=tmp_path / "mean", alpha=0.5)
    assert "every weight at the start of a guarded run" in report.origin
    average_checkpoint(base, tuned, out=tmp_path / "same", alpha=0.5)
    means = [load_file(tmp_path / name / "model.safetensors") for name in ("mean", "same")]
    assert all(torch.equal(means[0][name], means[1][name]) for name in means[1])
    moved = checkpoint_drift(kept, tuned)
    assert moved.tensors == checkpoint_drift(base, tuned).tensors and moved.tensors[0].num_changed_rows
    assert verify_checkpoint(base, against=kept).ok and not verify_checkpoint(tuned, against=kept).ok


def test_a_whole_start_without_a_config_says_how(pulled: tuple[Path, Path], tmp_path: Path) -> None:
    kept = tmp_path / "routeguard" / "start.safetensors"
    kept.parent.mkdir()
    shutil.copy(pulled[1] / "routeguard" / "start.safetensors", kept)
    with pytest.raises(ValueError, match=r"has no config.json to read it by.*routeguard.average\(model, '.*start.safe"):
        checkpoint_drift(kept, pulled[1])


def test_the_start_of_adapters_is_no_whole_start(pulled: tuple[Path, Path], tmp_path: Path) -> None:
    model = get_peft_model(tiny("lfm2"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["v_proj"]))
    run(model, tmp_path, RouteGuard(recipe="balanced"), max_steps=1)
    with pytest.raises(ValueError, match="of its adapters, not of a whole model; give the base checkpoint"):
        checkpoint_drift(tmp_path / "routeguard" / "start.safetensors", pulled[1])


@pytest.mark.parametrize("inside", [True, False])
def test_a_frozen_run_keeps_no_start(inside: bool, pulled: tuple[Path, Path], tmp_path: Path) -> None:
    run(tiny("lfm2"), tmp_path, RouteGuard(), max_steps=1)
    with pytest.raises(ValueError, match=r"holds no start \(a frozen run.*give the checkpoint that the run started"):
        verify_checkpoint(pulled[0], against=tmp_path / "routeguard" if inside else tmp_path)


def test_a_quantised_checkpoint_is_refused_by_verify_as_by_the_others(
    pulled: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(pulled[0], tmp_path / "quantised")
    file = tmp_path / "quantised" / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": {"quant_method": "bitsandbytes"}}
    file.write_text(json.dumps(config))
    for call in (lambda: verify_checkpoint(tmp_path / "quantised", against=pulled[0]),
                 lambda: checkpoint_drift(pulled[0], tmp_path / "quantised")):  # fmt: skip
        with pytest.raises(ValueError, match=r"quantised is quantised \(bitsandbytes\): the rows of a quantised"):
            call()
