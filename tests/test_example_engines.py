"""examples/engines: the script on one process, on two with every engine, and its configurations without typos."""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig

from routeguard import find_routes, read_drift
from routeguard.demo.model import WEIGHTS
from routeguard.demo.tasks import DIGITS, FILLER, NAMES
from tests.example_worker import SCRIPT

FOLDER = SCRIPT.parent
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its part for CPUs")
ENGINES = ["ddp", "fsdp2", *(pytest.param(z, marks=[needs_deepspeed, needs_compiler]) for z in ("zero2", "zero3"))]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    lines = []
    for _ in range(32):
        prompt = [f"let {draw.choice(NAMES)} {draw.choice(DIGITS)}", *draw.choices(FILLER, k=8)]
        completion = f" ask {draw.choice(NAMES)} + {draw.choice(DIGITS)} = {draw.choice(DIGITS)} ;"
        lines.append(json.dumps({"prompt": " ".join(prompt), "completion": completion}))
    path = tmp_path_factory.mktemp("data") / "cot.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the batches that two share."""
    output = tmp_path_factory.mktemp("one")
    run_here(data, output, "--protect", "track", batch_size=4)
    return output


def run_here(data: Path, output: Path, *more: str, batch_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments(data, output, *more, batch_size=batch_size)])
        runpy.run_path(str(SCRIPT), run_name="__main__")


def arguments(data: Path, output: Path, *more: str, batch_size: int) -> list[str]:
    options = ["--steps", "4", "--batch-size", str(batch_size), "--learning-rate", "1e-3", "--fp32"]
    return [str(WEIGHTS), str(data), "--output", str(output), *options, *more]


def run_two(engine: str, data: Path, output: Path, *more: str) -> None:
    """The script as two gloo processes, launched as README.md says."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if engine.startswith("zero"):
        tools = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu", "PATH": tools}
        more = (*more, "--deepspeed", str(FOLDER / f"{engine}.json"))
    else:
        environment["ACCELERATE_USE_CPU"] = "true"
    if engine == "fsdp2":
        environment |= fsdp_environment() | {"ACCELERATE_MIXED_PRECISION": "no"}
    what = [str(SCRIPT)] if engine == "ddp" else ["-m", "tests.example_worker", engine]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, *what, *arguments(data, output, *more, batch_size=2)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("routeguard: ") == 1  # one process speaks


def fsdp_environment() -> dict[str, str]:
    """The variables that `accelerate launch --config_file fsdp2.yaml` would set."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    parsed = launch_command_parser().parse_args(["--config_file", str(FOLDER / "fsdp2.yaml"), "sft.py"])
    found = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    return {name: value for name, value in found.items() if name.startswith(("FSDP_", "ACCELERATE_"))}


def held_and_moved(output: Path) -> tuple[list[bool], int]:
    """Whether each routed tensor of the saved model has the start's bits, and how many others moved."""
    start, tuned = load_file(WEIGHTS / "model.safetensors"), load_file(output / "model.safetensors")
    routed = find_routes(output).parameters
    others = [name for name in start if name not in routed]
    return (
        [torch.equal(start[name], tuned[name]) for name in routed],
        sum(not torch.equal(start[name], tuned[name]) for name in others),
    )


@pytest.mark.parametrize(("protect", "held"), [("freeze", True), ("anchor", False), ("l2_sp", False)])
def test_the_script_on_one_process(protect: str, held: bool, data: Path, tmp_path: Path) -> None:
    run_here(data, tmp_path, "--protect", protect, batch_size=2)
    same, moved = held_and_moved(tmp_path)
    assert same == [held] * 4 and moved > 20


def test_the_papers_method_on_one_process(one: Path) -> None:
    same, moved = held_and_moved(one)
    assert same == [True] * 4 and moved > 20
    assert max(read_drift(one / "routeguard" / "drift.jsonl")[1][-1].factors.values()) > 0.01


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_script_on_two_processes(engine: str, data: Path, one: Path, tmp_path: Path) -> None:
    saving = ["--save-steps", "2"] if engine == "fsdp2" else []
    run_two(engine, data, tmp_path, "--protect", "track", *saving)
    same, moved = held_and_moved(tmp_path)
    assert same == [True] * 4 and moved > 20
    found, expected = (read_drift(folder / "routeguard" / "drift.jsonl")[1] for folder in (tmp_path, one))
    assert [sample.step for sample in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours.factors.values()) == pytest.approx(list(theirs.factors.values()), rel=1e-3)
    if saving:  # a checkpoint with a full state dict, and the run that goes on from it
        straight = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").unlink()
        shutil.rmtree(tmp_path / "checkpoint-4")
        run_two(engine, data, tmp_path, "--protect", "track", "--resume", *saving)
        assert (tmp_path / "model.safetensors").read_bytes() == straight


def test_accelerate_reads_every_line_of_the_fsdp_config() -> None:
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    config = yaml.safe_load((FOLDER / "fsdp2.yaml").read_text())
    assert set(config["fsdp_config"]) <= known
    assert "fsdp_versoin" not in known  # the control
    environment = fsdp_environment()
    assert environment["FSDP_VERSION"] == "2" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_knows_every_key_of_its_configs(stage: int, tmp_path: Path) -> None:
    path = FOLDER / f"zero{stage}.json"
    config = json.loads(path.read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert not {"optimizer", "scheduler"} & set(config)
    _refuse_unknown(config)
    with pytest.raises(ValueError, match="overlap_com"):
        _refuse_unknown({**config, "zero_optimization": {"stage": stage, "overlap_com": True}})
    with pytest.raises(ValueError, match="gradient_cliping"):
        _refuse_unknown({**config, "gradient_cliping": 1.0})
    with pytest.MonkeyPatch.context() as patch:  # the Trainer's own reading of it
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
        settings = SFTConfig(output_dir=str(tmp_path), deepspeed=str(path), bf16=False, gradient_checkpointing=False)
    assert settings.hf_deepspeed_config.config["train_micro_batch_size_per_gpu"] == 8
    unset_hf_deepspeed_config()


def _refuse_unknown(config: dict[str, Any]) -> None:
    """ValueError for a key that DeepSpeed does not know; it ignores unknown ones at the top level itself."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {value for value in vars(constants).values() if isinstance(value, str)} | {"zero_optimization", "bf16"}
    unknown = set(config) - known
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    DeepSpeedZeroConfig(**{key: value for key, value in config["zero_optimization"].items() if value != "auto"})
    autos = [key for key, value in config["zero_optimization"].items() if value == "auto"]
    if (
        set(autos)
        - set(DeepSpeedZeroConfig.model_fields)
        - {field.alias for field in DeepSpeedZeroConfig.model_fields.values() if field.alias}
    ):
        raise ValueError(f"unknown keys among {autos}")
