"""The plug-ins in their real tools, by the tools' own commands: `make test-integrations` has the tools."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from routeguard.checkpoint.verify import verify_checkpoint
from routeguard.training.run_state import read_state
from tests.docs_pages import blocks
from tests.tiny_chat import save_both, tiny_chat

pytestmark = pytest.mark.slow
Weights = Mapping[str, torch.Tensor]


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """A folder with a tiny model (`base`) and a few conversations (`data.jsonl`)."""
    save_both(*tiny_chat(Qwen3ForCausalLM, head_dim=8), tmp_path / "base")
    rows = [
        {"messages": [{"role": "user", "content": f"{n} apples?"}, {"role": "assistant", "content": f"{n} pears."}]}
        for n in range(40)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def run(stage: Path, *command: str, fails: bool = False) -> str:
    """What a command prints; it runs in the stage, without a GPU or the net."""
    changes = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=stage,
        env={**os.environ, **changes, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert (done.returncode != 0) == fails, done.stdout[-6000:]
    return done.stdout


def weights(folder: Path) -> Weights:
    return load_file(next(iter(sorted(folder.glob("*.safetensors")))))


def moved(stage: Path, output: Path) -> tuple[bool, bool]:
    """Whether any query or key projection is other than the base's, and whether any value projection is."""
    base, tuned = weights(stage / "base"), weights(output)

    def any_moved(*projections: str) -> bool:
        names = [name for name in base if name.split(".")[-2] in projections]
        assert names
        return any(not torch.equal(base[name].float(), tuned[name].float()) for name in names)

    return any_moved("q_proj", "k_proj"), any_moved("v_proj")


# -- axolotl ----------------------------------------------------------------------------------------------------------


def axolotl_config(stage: Path, **section: Any) -> dict[str, Any]:
    return {
        "base_model": str(stage / "base"),
        "plugins": ["routeguard.integrations.axolotl.RouteGuardPlugin"],
        "datasets": [{"path": str(stage / "data.jsonl"), "ds_type": "json", "type": "chat_template"}],
        "dataset_prepared_path": str(stage / "prepared"),
        "output_dir": str(stage / "out"),
        "chat_template": "tokenizer_default",
        "sequence_len": 64,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "attn_implementation": "eager",
        "train_on_inputs": True,
        "save_strategy": "no",
        **section,
    }


def axolotl(stage: Path, config: dict[str, Any], *, fails: bool = False) -> str:
    pytest.importorskip("axolotl", reason="axolotl is tested in an environment of its own")
    (stage / "config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return run(stage, "-m", "axolotl.cli.train", "config.yml", fails=fails)


def test_axolotl_freezes_by_default(stage: Path) -> None:
    said = axolotl(stage, axolotl_config(stage))
    assert "routeguard: freeze: queries and keys" in said
    assert moved(stage, stage / "out") == (False, True)


def test_axolotl_takes_the_section(stage: Path) -> None:
    axolotl(stage, axolotl_config(stage, routeguard={"protect": {"mode": "low_lr", "scale": 0.05}, "restore": "qk"}))
    state = read_state(stage / "out")
    assert state is not None
    assert (state.protect, state.restore) == ({"mode": "low_lr", "scale": 0.05}, {"mode": "qk"})
    assert moved(stage, stage / "out") == (False, True)


def test_without_the_plugin_axolotl_moves_queries_and_keys(stage: Path) -> None:
    said = axolotl(stage, {**axolotl_config(stage), "plugins": []})
    assert "routeguard:" not in said
    assert moved(stage, stage / "out") == (True, True)


def test_axolotl_stops_at_a_wrong_key(stage: Path) -> None:
    said = axolotl(stage, axolotl_config(stage, routeguard={"protct": "freeze"}), fails=True)
    assert "key 'protct' is not understood; closest 'protect'" in said
    assert not (stage / "out").exists()


# -- ms-swift ---------------------------------------------------------------------------------------------------------


def swift(stage: Path, *options: str, fails: bool = False) -> str:
    pytest.importorskip("swift", reason="ms-swift is tested in an environment of its own")
    return run(
        stage,
        *("-m", "swift.cli.sft", "--model", str(stage / "base"), "--model_type", "qwen3", "--template", "qwen"),
        *("--tuner_type", "full", "--dataset", str(stage / "data.jsonl"), "--output_dir", str(stage / "out")),
        *("--add_version", "false", "--max_steps", "2", "--learning_rate", "1e-3", "--torch_dtype", "float32"),
        *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1", "--attn_impl", "eager"),
        *("--dataset_num_proc", "1", "--dataloader_num_workers", "0", "--split_dataset_ratio", "0"),
        *("--gradient_checkpointing", "false", "--report_to", "none", *options),
        fails=fails,
    )


def test_swift_restores_at_the_end(stage: Path) -> None:
    lines = "from routeguard.integrations.swift import register\nregister(protect='track', restore='qk')\n"
    (stage / "guard.py").write_text(lines, encoding="utf-8")
    said = swift(stage, "--external_plugins", "guard.py", "--callbacks", "routeguard")
    assert "routeguard: track" in said
    assert (stage / "out" / "routeguard" / "restore.json").is_file()


def test_swift_freezes(stage: Path) -> None:
    lines = "from routeguard.integrations.swift import register\nregister()\n"
    (stage / "guard.py").write_text(lines, encoding="utf-8")
    swift(stage, "--external_plugins", "guard.py", "--callbacks", "routeguard")
    assert moved(stage, stage / "out" / "checkpoint-2") == (False, True)


def test_without_the_callback_swift_moves_queries_and_keys(stage: Path) -> None:
    swift(stage)
    assert moved(stage, stage / "out" / "checkpoint-2") == (True, True)


# -- LLaMA-Factory ----------------------------------------------------------------------------------------------------


def llamafactory(stage: Path, module: str, *, fails: bool = False, **section: Any) -> str:
    pytest.importorskip("llamafactory", reason="LLaMA-Factory is tested in an environment of its own")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages"}
    entry = {"file_name": "data.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (stage / "dataset_info.json").write_text(json.dumps({"few": entry}), encoding="utf-8")
    config = {
        "model_name_or_path": str(stage / "base"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "few",
        "dataset_dir": str(stage),
        "template": "default",
        "output_dir": str(stage / "out"),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_gradient_checkpointing": True,
        "use_cpu": True,
        **section,
    }
    (stage / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if importlib.util.find_spec("torchaudio") is None:
        (stage / "torchaudio.py").write_text("")  # imported at the start, used for sound only
    return run(stage, "-m", module, "config.yaml", fails=fails)


OURS = "routeguard.integrations.llamafactory"


def test_llama_factory_freezes_by_default(stage: Path) -> None:
    said = llamafactory(stage, OURS)
    assert "routeguard: freeze: queries and keys" in said
    assert moved(stage, stage / "out") == (False, True)


def test_llama_factory_takes_the_section(stage: Path) -> None:
    llamafactory(stage, OURS, routeguard={"protect": "track", "restore": "qk"})
    state = read_state(stage / "out")
    assert state is not None
    assert (state.protect, state.restore) == ({"mode": "track"}, {"mode": "qk"})
    assert moved(stage, stage / "out") == (False, True)


def test_without_the_guard_llama_factory_moves_queries_and_keys(stage: Path) -> None:
    llamafactory(stage, "llamafactory.launcher")
    assert moved(stage, stage / "out") == (True, True)


def test_llama_factory_itself_refuses_the_section(stage: Path) -> None:
    said = llamafactory(stage, "llamafactory.launcher", fails=True, routeguard={"protect": "track"})
    assert "routeguard" in said


# -- Unsloth ----------------------------------------------------------------------------------------------------------

ADAPTERS, FULL = (block.code for block in blocks("docs/integrations.md") if "from unsloth" in block.code)
TARGETS, LENGTH = ", target_modules=targets.target_modules", "max_length=4096"
EXACT = {"full_finetuning=True": "full_finetuning=True, dtype=torch.float32"}
CONVERSATIONS = """
import torch
from datasets import load_dataset

cot = load_dataset("json", data_files="data.jsonl", split="train")
"""
GPU_CODE = "import tests.tools.unsloth_gpu_code\n"


def unsloth(stage: Path, code: str, *, gpu_code: bool = False, fails: bool = False) -> str:
    """What code prints with Unsloth's backend for CPUs, or with its code for GPUs, on a tiny hybrid."""
    if importlib.util.find_spec("unsloth") is None:  # importing it here would patch this process
        pytest.skip("Unsloth is tested in an environment of its own")
    from transformers import Qwen3_5ForCausalLM  # newer than some of the tools' transformers

    sizes = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    model, tokenizer = tiny_chat(Qwen3_5ForCausalLM, **shape, **sizes)
    save_both(model.bfloat16(), tokenizer, stage / "base")
    (stage / "train.py").write_text((GPU_CODE if gpu_code else "") + CONVERSATIONS + code, encoding="utf-8")
    return run(stage, "train.py", fails=fails)


def on_tiny_inputs(lines: str, changes: Mapping[str, str] | None = None) -> str:
    """Lines of the page for a tiny model and a few steps, with changes."""
    few = "max_length=64, max_steps=2, report_to='none', learning_rate=1e-2, use_cpu=True"
    for old, new in {"your/hybrid": "base", LENGTH: few, "4096": "64", **(changes or {})}.items():
        assert old in lines
        lines = lines.replace(old, new)
    return lines + "\ntrainer.save_model()\n"


def adapted(output: Path) -> dict[str, bool]:
    """Whether the adapters of each kind of module have moved."""
    parts = load_file(output / "adapter_model.safetensors")
    return {name.split(".lora_B")[0].split(".")[-1]: bool(b.any()) for name, b in parts.items() if ".lora_B" in name}


@pytest.mark.parametrize("gpu_code", [False, True])
def test_unsloth_puts_no_adapter_on_queries_and_keys(stage: Path, gpu_code: bool) -> None:
    said = unsloth(stage, on_tiny_inputs(ADAPTERS), gpu_code=gpu_code)
    assert "LoRA coverage: 29 of 32 linear modules" in said and "routeguard: freeze: queries and keys" in said
    assert gpu_code or "4-bit = True" in said
    modules = adapted(stage / "out")
    assert modules["v_proj"] and modules["gate_proj"] and modules["in_proj_qkv"]
    assert not {"q_proj", "k_proj"} & set(modules)


def test_the_coverage_check_stops_unsloths_own_targets(stage: Path) -> None:
    said = unsloth(stage, on_tiny_inputs(ADAPTERS, {TARGETS: ""}), fails=True)
    assert "1 query or key tensors of full attention would be trained: model.layers.3.self_attn.k_proj" in said
    assert not (stage / "out").exists()


def test_unsloths_own_targets_move_queries_and_keys(stage: Path) -> None:
    unguarded = {TARGETS: "", "check_lora_coverage(model)\n": "", "RouteGuard()": ""}
    unsloth(stage, on_tiny_inputs(ADAPTERS, unguarded))
    modules = adapted(stage / "out")
    assert modules["q_proj"] and modules["k_proj"]


@pytest.mark.parametrize("gpu_code", [False, True])
def test_unsloth_freezes_to_the_row(stage: Path, gpu_code: bool) -> None:
    said = unsloth(stage, on_tiny_inputs(FULL, EXACT), gpu_code=gpu_code)
    assert "routeguard: freeze: queries and keys" in said and "by row: 1 tensors are held in part (64 rows)" in said
    checks = verify_checkpoint(stage / "out", stage / "base").checks
    # Without a GPU that has bfloat16, Unsloth's code for GPUs loads float16, whatever the dtype asked for.
    assert [check.rounding or check.num_differing for check in checks] == ([0, "float16"] if gpu_code else [0, 0])
    assert moved(stage, stage / "out") == (True, True)  # the rows of the output gate, beside the queries'


def test_without_the_guard_unsloth_moves_queries_and_keys(stage: Path) -> None:
    unsloth(stage, on_tiny_inputs(FULL, {**EXACT, "RouteGuard()": ""}))
    assert {check.role for check in verify_checkpoint(stage / "out", stage / "base").mismatches} == {"query", "key"}


# -- Lightning --------------------------------------------------------------------------------------------------------

FREEZE_LINES = ("self.frozen = freeze(self.model, self.routes)", "self.frozen.attach(optimizer)")
LIGHTNING_DRIVER = """
if __name__ == "__main__":
    import sys

    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, at):
            ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(at))
            return {"input_ids": ids, "labels": ids}

    module = Guarded("base")
    trainer = Trainer(
        max_steps=4, log_every_n_steps=2, accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2],
        enable_progress_bar=False, enable_checkpointing=False, logger=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=4))
    if trainer.is_global_zero:
        print({name: value.item() for name, value in trainer.logged_metrics.items()})
        module.model.save_pretrained("out")
"""


def lightning(stage: Path, devices: int, strategy: str, *, guarded: bool = True) -> str:
    """What the module of the documentation prints when Lightning trains it; without its two lines if not guarded."""
    pytest.importorskip("lightning.pytorch", reason="Lightning is tested in an environment of its own")
    (code,) = (block.code for block in blocks("docs/integrations.md") if "LightningModule" in block.code)
    for line in FREEZE_LINES:
        assert line in code
        code = code if guarded else code.replace(line, "pass")
    (stage / "guarded.py").write_text(code + LIGHTNING_DRIVER, encoding="utf-8")
    return run(stage, "guarded.py", str(devices), strategy)


@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp")])
def test_lightning_freezes(stage: Path, devices: int, strategy: str) -> None:
    said = lightning(stage, devices, strategy)
    assert "'drift/query': 0.0, 'drift/key': 0.0" in said
    assert moved(stage, stage / "out") == (False, True)


def test_without_the_two_lines_lightning_moves_queries_and_keys(stage: Path) -> None:
    said = lightning(stage, 1, "auto", guarded=False)
    assert "drift/query" in said and "'drift/query': 0.0," not in said
    assert moved(stage, stage / "out") == (True, True)
