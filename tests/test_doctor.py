"""The doctor: what it reads from configs, and that each of its rules speaks up where it should and nowhere else."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model

from routeguard import Anchor, Average, LowLR, RouteGuard, check_lora_coverage, find_routes, freeze
from routeguard.cli.main import app
from routeguard.doctor.environment import check_environment, missing_extra
from routeguard.doctor.examine import examine
from routeguard.doctor.findings import Finding, Report
from routeguard.doctor.read_config import read_settings
from routeguard.doctor.rehearsal import rehearse_engine
from routeguard.doctor.settings import AdapterSettings, TrainingSettings
from routeguard.protect.recipes import choose
from routeguard.training.engines import Engine
from routeguard.training.resolution import moving_share
from tests.loops import tiny
from tests.trainers import run
from tests.zoo.build import build

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved tiny model by its name in the zoo."""
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case.replace("/", "-"))
            build(case).save_pretrained(made[case])
        return made[case]

    return folder


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a config and give its path; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)

    def to_file(name: str = "run.yaml", **settings: Any) -> Path:
        (tmp_path / name).write_text(json.dumps(settings))  # JSON is YAML
        return tmp_path / name

    return to_file


def texts(report: Report | list[Finding], level: str, about: str = "") -> str:
    findings = report.findings if isinstance(report, Report) else report
    return "\n".join(f.text for f in findings if f.level == level and about in f.about)


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "version", "level", "text", "do"),
    [
        ("trl", "0.9.6", "error", "trl is 0.9.6; trl>=", "pip install --upgrade 'trl>="),
        ("trl", None, "error", "trl is not installed", "pip install --upgrade 'trl>="),
        ("bitsandbytes", None, "note", "bitsandbytes is not installed (optional)", "pip install 'routeguard[quant]'"),
        ("bitsandbytes", "0.1.0", "error", "bitsandbytes is 0.1.0", "pip install --upgrade 'bitsandbytes>="),
    ],
)
def test_packages_outside_their_bounds(
    package: str, version: str | None, level: str, text: str, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package not in "".join(f.text for f in check_environment() if f.level != "ok")
    real = metadata.version

    def pretended(name: str) -> str:
        if name == package and version is None:
            raise metadata.PackageNotFoundError(name)
        return str(version) if name == package else real(name)

    monkeypatch.setattr(metadata, "version", pretended)
    found = [f for f in check_environment() if package in f.text and f.level == level]
    assert len(found) == 1 and text in found[0].text and found[0].do.startswith(do)


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Python" not in texts(check_environment(), "error")
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.1")
    assert "Python is 3.9.1; >=3.10 is needed" in texts(check_environment(), "error")


def test_what_a_config_needs_must_be_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(load_in_4bit=True, use_peft=True)
    if missing_extra("bitsandbytes") is None:
        assert "bitsandbytes" not in texts(examine(config), "error")
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "bitsandbytes" else real(name))
    assert missing_extra("torch") is None
    found = missing_extra("bitsandbytes")
    assert found is not None and "the config needs bitsandbytes, which is 0.1, too old" in found.text


def test_the_gpu_that_is_here(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(learning_rate=1e-5)
    assert "torch sees no GPU" in texts(check_environment(), "note") or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "T4")
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda answer=supported: answer)
        assert f"2 GPU (T4), {'computes' if supported else 'does not compute'} in bf16" in texts(
            check_environment(), "ok"
        )
        warned = "which the GPU here does not" in texts(examine(config), "warning", "engine")
        assert warned != supported


# -- reading configs ---------------------------------------------------------------------------------------------------


def test_a_config_of_trl(write: Write) -> None:
    path = write(
        model_name_or_path="a/b", dtype="bfloat16", learning_rate="1e-5", optim="adafactor", use_peft=True, lora_r=8,
        lora_target_modules=["q_proj", "v_proj"], packing=True, max_length=4096, dataset_name="x", beta=0.1,
    )  # fmt: skip
    found = read_settings(path)
    assert found == TrainingSettings(
        tool="trl", model="a/b", dtype="bfloat16", learning_rate=1e-5, optimizer="adafactor",
        adapter=AdapterSettings(rank=8, target_modules=("q_proj", "v_proj")),
    )  # fmt: skip
    assert read_settings(write(learning_rate=1e-5, fp16=True)).mixed_precision == "fp16"
    nested = read_settings(write(model_name_or_path="a/b", model_init_kwargs={"torch_dtype": "float16"}))
    assert nested.dtype == "float16"
    one = read_settings(write(use_peft=True, lora_target_modules=["all-linear"]))
    assert one.adapter is not None and one.adapter.target_modules == "all-linear"


def test_a_config_of_axolotl(write: Write) -> None:
    found = read_settings(
        write(
            base_model="a/b",
            adapter="qlora",
            load_in_4bit=True,
            lora_r=16,
            lora_target_linear=True,
            bf16="auto",
            learning_rate=2e-4,
            optimizer="adamw_bnb_8bit",
            peft_use_dora=True,
        )
    )
    assert found == TrainingSettings(
        tool="axolotl", model="a/b", dtype="bfloat16", learning_rate=2e-4, optimizer="adamw_bnb_8bit",
        quantised_bits=4, adapter=AdapterSettings(rank=16, target_modules="all-linear", use_dora=True),
    )  # fmt: skip
    regex = read_settings(write(base_model="a/b", adapter="lora", lora_target_modules="x|y,z", learning_rate=1e-4))
    assert regex.adapter is not None and regex.adapter.target_modules == "x|y,z"
    other = read_settings(write(base_model="a/b", adapter="llama-adapter"))
    assert len(other.problems) == 2 and other.adapter is None and other.dtype == "float32"


def test_a_config_of_llama_factory(write: Write) -> None:
    found = read_settings(write(model_name_or_path="a/b", stage="sft", bf16=True, lora_target="q_proj,v_proj"))
    assert found == TrainingSettings(
        tool="llama-factory", model="a/b", dtype="float32", learning_rate=5e-5,
        adapter=AdapterSettings(rank=8, target_modules=("q_proj", "v_proj")),
    )  # fmt: skip
    full = read_settings(write(model_name_or_path="a/b", finetuning_type="full", bf16=True, pure_bf16=True))
    assert full.adapter is None and full.dtype == "bfloat16"
    assert (
        "freeze is not looked at"
        in read_settings(write(model_name_or_path="a/b", finetuning_type="freeze")).problems[0]
    )


@pytest.mark.parametrize(
    ("settings", "engine", "stage"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 3}, "optimizer": {}}}, "DeepSpeed", 3),
        ({"deepspeed": "ds.json"}, "DeepSpeed", 2),
        ({"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}, "FSDP2", 0),
        ({"fsdp": ["full_shard"], "fsdp_config": {"version": 1, "use_orig_params": "false"}}, "FSDP1", 0),
        ({"fsdp": ""}, None, 0),
        ({"fsdp_config": {"version": 2}}, None, 0),
    ],
)
def test_the_engine_of_a_config(settings: dict[str, Any], engine: str | None, stage: int, write: Write) -> None:
    write("ds.json", zero_optimization={"stage": 2})
    found = read_settings(write(learning_rate=1e-5, **settings))
    assert (None if found.engine is None else found.engine.name, found.zero_stage) == (engine, stage)
    if engine == "FSDP1":
        assert found.engine is not None and not found.engine.use_orig_params
    if stage == 3:
        assert found.engine is not None and "optimizer" in found.engine.own_blocks


def test_the_engine_of_an_axolotl_config(write: Write) -> None:
    common = {"base_model": "a/b", "learning_rate": 1e-4}
    two = read_settings(write(**common, fsdp_version=2, fsdp_config={"offload_params": False}))
    one = read_settings(write(**common, fsdp=["full_shard"]))
    assert two.engine == Engine("FSDP2") and one.engine == Engine("FSDP1")


def test_keys_that_were_not_looked_at(write: Write) -> None:
    found = read_settings(
        write(learning_rate=1e-5, packing=True, lora_target_module="x", parallelism_config={}, banana=3)
    )
    assert found.unlooked == (
        "lora_target_module (did you mean lora_target_modules?)", "parallelism_config", "banana",
    )  # fmt: skip
    other = read_settings(write(base_model="a/b", learning_rate=1e-5, unfrozen_parameters=["^lm_head"]))
    assert other.unlooked == ("unfrozen_parameters",)
    third = read_settings(
        write(
            model_name_or_path="a/b",
            stage="sft",
            template="x",
            do_train=True,
            freeze_vision_tower=1,
            warmup_ratio=0.1,
            overwrite_output_dir=True,
        )
    )
    assert third.unlooked == ("freeze_vision_tower",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("- a\n- b", "holds no settings"),
        ("a: [", "neither YAML nor JSON"),
        ("banana: 3", "is no config that is understood"),
        ("base_model: a\nmodel_name_or_path: b", "whose config is it"),
        ("learning_rate: fast", "learning_rate is 'fast', not a number"),
        ("use_peft: perhaps", "use_peft is 'perhaps', not true or false"),
        ("use_peft: true\nlora_r: 1.5", "lora_r is 1.5, not a whole number"),
        ("dtype: int3", "choose from"),
        ("deepspeed: nowhere.json", "deepspeed names nowhere.json, which is not a file"),
        ("use_peft: true\nlora_target_modules: {a: 1}", "not a list of names"),
    ],
)
def test_a_config_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "run.yaml")])
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


# -- engines, before any model is looked at ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "protect", "restore", "message"),
    [
        (TrainingSettings(engine=Engine("FSDP1")), "low_lr", None, "flattened"),
        (TrainingSettings(engine=Engine("FSDP1", use_orig_params=False)), "freeze", None, "use_orig_params"),
        (TrainingSettings(engine=Engine("FSDP2")), "track", "qk_pro", "whole matrices"),
        (
            TrainingSettings(
                engine=Engine("DeepSpeed", frozenset({"optimizer"})), deepspeed={"zero_optimization": {"stage": 2}}
            ),
            "anchor",
            None,
            "its own 'optimizer' block",
        ),
        (TrainingSettings(engine=Engine("DeepSpeed"), deepspeed={}), "freeze", None, "stage 0 in 16 bits"),
    ],
)
def test_what_an_engine_does_not_carry(
    settings: TrainingSettings, protect: str, restore: str | None, message: str
) -> None:
    found = rehearse_engine(settings, choose(protect, restore))
    assert message in texts(found, "error", "engine")
    assert "RecallProbe is not supported" in texts(found, "warning", "recall")


def test_what_an_engine_carries() -> None:
    assert rehearse_engine(TrainingSettings(), choose()) == []
    found = rehearse_engine(TrainingSettings(engine=Engine("FSDP2")), choose("low_lr"))
    assert texts(found, "error") == "" and "FSDP2 carries low_lr" in texts(found, "ok")


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_run_that_nothing_keeps_from_being_guarded(folders: Any, write: Write) -> None:
    folder = folders("lfm2")
    report = examine(write(model_name_or_path=str(folder), learning_rate=1e-5))
    routes = find_routes(folder)
    assert report.ok and "freeze: queries and keys of the full-attention layers keep" in texts(report, "ok", "guard")
    assert report.held["layers"] == list(routes.layers) and report.held["num_bytes"] == routes.num_bytes
    assert "adamw_torch_fused (AdamW) serves freeze" in texts(report, "ok", "optimizer")
    assert "trainer = SFTTrainer(..., callbacks=[RouteGuard()])" in report.recipe
    assert not Path("unused").exists()  # nothing is written
    assert "every layer" not in texts(report, "warning") and "full attention; routeguard" not in texts(
        report, "warning"
    )


def test_the_weights_are_not_needed(folders: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folders("lfm2") / "config.json").read_text())
    report = examine(model=tmp_path)
    assert report.ok and "holds no safetensors" in texts(report, "note", "model")
    assert report.held["layers"] == [2, 5]


def test_optimizers_are_refused_in_the_guards_words(folders: Any, write: Write) -> None:
    config = write(model_name_or_path=str(folders("qwen3_5_text")), optim="adafactor")
    model = tiny("qwen3_5_text")
    from transformers.optimization import Adafactor

    with pytest.raises(ValueError, match="treat rows independently") as refused:
        freeze(model, find_routes(model)).attach(Adafactor(model.parameters()))
    report = examine(config)
    assert str(refused.value) in texts(report, "error", "optimizer") and not report.ok and not report.recipe
    whole = examine(write(model_name_or_path=str(folders("lfm2")), optim="adafactor"))
    assert whole.ok


def test_an_anchor_that_pulls_too_far(folders: Any, write: Write) -> None:
    folder = str(folders("lfm2"))
    assert "pulls by more than" in texts(
        examine(write(model_name_or_path=folder, learning_rate=0.1), protect="anchor"), "error", "optimizer"
    )
    assert examine(write(model_name_or_path=folder, learning_rate=1e-5), protect="anchor").ok


def test_an_optimizer_that_cannot_be_made(folders: Any, write: Write) -> None:
    report = examine(write(model_name_or_path=str(folders("lfm2")), optim="no_such"))
    assert "no_such could not be made here" in texts(report, "warning", "optimizer")


def test_rows_inside_shards(folders: Any, write: Write) -> None:
    fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
    rows = write("rows.yaml", model_name_or_path=str(folders("qwen3_5_text")), **fsdp)
    assert "holds routing rows beside others" in texts(examine(rows, protect="low_lr"), "error")
    assert examine(rows).ok
    assert examine(write(model_name_or_path=str(folders("lfm2")), **fsdp), protect="low_lr").ok


def test_masters_on_disk(folders: Any, write: Write) -> None:
    for device, refused in (("nvme", True), ("cpu", False)):
        zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}}
        report = examine(write(model_name_or_path=str(folders("lfm2")), deepspeed=zero), protect="low_lr")
        assert ("swapped out to disk" in texts(report, "error", "engine")) == refused


def test_a_quantised_base_needs_an_adapter(folders: Any, write: Write) -> None:
    common = {"model_name_or_path": str(folders("lfm2")), "load_in_4bit": True}
    assert "there is no adapter" in texts(examine(write(**common)), "error", "guard")
    adapter = examine(write(**common, use_peft=True, lora_target_modules=["all-linear"]), protect="track")
    assert "there is no adapter" not in texts(adapter, "error")


def test_a_pure_softmax_model(folders: Any) -> None:
    report = examine(model=folders("llama"))
    assert "routeguard is made for hybrids" in texts(report, "warning", "guard") and report.ok
    assert "made for hybrids" not in texts(examine(model=folders("lfm2")), "warning")


def test_a_model_that_only_its_own_code_builds(folders: Any, tmp_path: Path) -> None:
    config = json.loads((folders("lfm2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    (tmp_path / "model.safetensors").write_bytes((folders("lfm2") / "model.safetensors").read_bytes())
    report = examine(model=tmp_path)
    assert "cannot build this model without code from the folder" in texts(report, "warning", "model")
    assert report.ok and report.held["layers"] == [2, 5] and texts(report, "ok", "model") == str(find_routes(tmp_path))


def test_a_model_without_full_attention(folders: Any) -> None:
    report = examine(model=folders("phimoe/window"))
    assert texts(report, "error").count("has no full-attention layer") == 1 and not report.ok


@pytest.mark.parametrize(
    "guard",
    [
        RouteGuard(),
        RouteGuard(LowLR(0.1)),
        RouteGuard(Anchor(30.0)),
        RouteGuard("track", "qk"),
        RouteGuard(recipe="balanced"),
    ],
)
@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
def test_it_says_what_the_guard_says(case: str, guard: RouteGuard, folders: Any, write: Write, tmp_path: Path) -> None:
    guard = RouteGuard(guard.protect, guard.restore)
    run(tiny(case), tmp_path / "out", guard, max_steps=1)
    config = write(model_name_or_path=str(folders(case)), learning_rate=1e-2)
    report = examine(config, protect=guard.protect, restore=guard.restore)
    assert guard.summary == f"routeguard: {texts(report, 'ok', 'guard')}"


@pytest.mark.parametrize("init", [True, "pissa"])
def test_it_says_how_much_of_adapters_is_pulled(init: Any, folders: Any, write: Write, tmp_path: Path) -> None:
    guard, targets = RouteGuard(recipe="balanced"), ["q_proj", "v_proj", "embed_tokens"]
    options = {"r": 8, "lora_alpha": 16, "target_modules": targets, "init_lora_weights": init}
    model = get_peft_model(tiny("lfm2"), LoraConfig(task_type="CAUSAL_LM", **options))
    run(model, tmp_path / "out", guard, max_steps=1)
    config = write(
        base_model=str(folders("lfm2")),
        adapter="lora",
        lora_r=8,
        lora_target_modules=targets,
        peft_init_lora_weights=init,
        learning_rate=1e-2,
        bf16=False,
    )
    found = texts(examine(config, recipe="balanced"), "ok", "guard")
    assert guard.summary == f"routeguard: {found}"
    free = {True: 5, "pissa": 1}[init]  # all, or that of the embedding, to which PEFT does no PiSSA
    assert f"(not {free} factors of adapters whose other factor, at zero, is pulled)" in found


def test_a_model_that_is_not_here(write: Write) -> None:
    report = examine(write(model_name_or_path="no-such/model"))
    assert "what an accelerate config adds is not seen" in texts(report, "note", "engine")
    sharded = examine(write(model_name_or_path="no-such/model", fsdp="full_shard", fsdp_config={"version": 2}))
    assert "accelerate config" not in texts(sharded, "note")
    assert report.ok and "nothing about it was looked at" in texts(report, "warning", "model")
    with pytest.raises(ValueError, match="nothing is downloaded"):
        examine(model="no-such/model")


def test_whether_recall_can_be_measured(folders: Any, tmp_path: Path) -> None:
    assert "no tokenizer" in texts(examine(model=folders("lfm2")), "note", "recall")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders("lfm2") / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "recall can be measured" in texts(examine(model=tmp_path), "ok", "recall")


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_on_queries_and_keys(folders: Any, write: Write) -> None:
    common = {"model_name_or_path": str(folders("lfm2")), "use_peft": True}
    report = examine(write(**common, lora_target_modules=["q_proj", "v_proj"]))
    assert report.ok and "they take memory and do nothing" in texts(report, "warning", "adapters")
    assert "the adapters reach 2 of 6 layers" in texts(report, "warning", "adapters")
    line = next(line for line in report.recipe if line.startswith("lora_target_modules"))
    advised = write("advised.yaml", **common, lora_target_modules=[line.split("'")[1]])
    better = examine(advised)
    assert texts(better, "warning") == "" and "stand still anyway" in texts(better, "ok", "adapters")
    anchored = examine(write(**common, lora_target_modules=["q_proj", "k_proj"]), protect="anchor")
    assert "are what anchor acts on" in texts(anchored, "note", "adapters")


def test_advised_targets_hold_on_the_real_model(folders: Any, write: Write) -> None:
    from peft import LoraConfig, get_peft_model

    report = examine(
        write(model_name_or_path=str(folders("qwen3_5_text")), use_peft=True, lora_target_modules=["all-linear"])
    )
    config = LoraConfig(r=2, **report.lora)
    assert check_lora_coverage(get_peft_model(tiny("qwen3_5_text"), config), quiet=True).adapted
    assert "self_attn.q_proj (1 layer) will be frozen in the rows" in texts(report, "note", "adapters")
    assert "self_attn.k_proj (1 layer) will be frozen: they take" in texts(report, "warning", "adapters")


def test_a_target_that_the_model_has_not(folders: Any, write: Write) -> None:
    report = examine(
        write(model_name_or_path=str(folders("lfm2")), use_peft=True, lora_target_modules=["q_prj", "v_prj"])
    )
    assert "PEFT cannot put this adapter on the model" in texts(report, "error", "adapters")
    one = examine(write(model_name_or_path=str(folders("lfm2")), use_peft=True, lora_target_modules=["q_proj"]))
    assert "q_proj not found" in texts(one, "error", "adapters")  # TRL hands PEFT a lone name as a regular expression


def test_an_adapter_that_does_not_start_at_zero(folders: Any, write: Write) -> None:
    common = {"model_name_or_path": str(folders("qwen3_5_text")), "finetuning_type": "lora"}
    assert "the adapter starts elsewhere" in texts(examine(write(**common, pissa_init=True)), "error", "guard")
    assert "the adapter starts elsewhere" not in texts(examine(write(**common)), "error")


# -- updates below the resolution of the weights -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1e-6, 5e-6, 3e-5])
def test_the_share_of_weights_that_a_step_moves(step: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(200_000, generator=generator)).to(dtype)
    moved = (weights.float() - step).to(dtype) != weights
    assert moving_share(step, 0.02, dtype) == pytest.approx(moved.float().mean().item(), abs=0.01)


def test_updates_that_rounding_swallows(folders: Any, write: Write) -> None:
    common = {"model_name_or_path": str(folders("lfm2")), "learning_rate": 1e-5}
    swallowed = "below the resolution of bfloat16"
    assert swallowed in texts(examine(write(**common, dtype="bfloat16"), protect="low_lr"), "warning", "optimizer")
    assert swallowed not in texts(examine(write(**common), protect="low_lr"), "warning")
    assert swallowed not in texts(examine(write(**common, dtype="bfloat16")), "warning")
    zero = {"zero_optimization": {"stage": 2}}
    masters = examine(write(**common, dtype="bfloat16", deepspeed=zero), protect="low_lr")
    assert swallowed not in texts(masters, "warning")


def test_a_section_in_a_config_for_trl_is_an_error(folders: Any, write: Write) -> None:
    report = examine(write(model_name_or_path=str(folders("lfm2")), routeguard={"protect": "track"}))
    assert not report.ok and not report.recipe
    assert "the section routeguard stops the run: TRL refuses keys" in texts(report, "error", "config")
    assert "routeguard" not in texts(report, "note", "config")


# -- the command -------------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(folders: Any, write: Write) -> None:
    call = CliRunner().invoke
    good = call(app, ["doctor", "--model", str(folders("lfm2")), "--protect", "track", "--restore", "qk", "--json"])
    assert good.exit_code == 0
    found = json.loads(good.stdout)
    assert found["schema_version"] == 1 and found["ok"] and found["held"]["num_layers"] == 6
    assert "callbacks=[RouteGuard(protect='track', restore='qk')]" in found["recipe"][-1]
    bad = call(app, ["doctor", str(write(model_name_or_path=str(folders("lfm2")), load_in_8bit=True))])
    assert bad.exit_code == 1 and "\nerror\n" in bad.output and "to guard this run" not in bad.output
    meaningless = call(app, ["doctor", "--model", str(folders("lfm2")), "--restore", "qk"])
    assert meaningless.exit_code == 2 and "meaningless" in meaningless.output
    assert call(app, ["doctor"]).exit_code == 0
    nowhere = write("nowhere.yaml", model_name_or_path="nowhere")
    assert call(app, ["doctor", str(nowhere)]).exit_code == 0  # as docs/doctor.md says
    assert call(app, ["doctor", str(nowhere), "--model", "nowhere"]).exit_code == 2


@pytest.mark.parametrize("key", ["tuner_type", "train_type", "external_plugins"])
def test_a_config_of_ms_swift_is_refused(key: str, write: Write) -> None:
    config = {"model": "a/b", "torch_dtype": "bfloat16", "learning_rate": 1e-5}
    assert read_settings(write(**config)).tool == "trl"  # nothing tells it from one of TRL
    with pytest.raises(ValueError, match=f"has {key}, a key of ms-swift.*--model FOLDER"):
        read_settings(write(**config, **{key: "x"}))


def test_the_lines_for_other_tools(write: Write) -> None:
    plugin = "plugins: [routeguard.integrations.axolotl.RouteGuardPlugin]"
    axolotl = write("axolotl.yaml", base_model="no-such/model", learning_rate=1e-5)
    assert examine(axolotl).recipe == ("# in the config", plugin)
    section = ("routeguard:", "  protect: track", "  restore: {mode: average, alpha: 0.25}")
    chosen = {"protect": "track", "restore": Average(0.25)}
    assert examine(axolotl, **chosen).recipe == ("# in the config", plugin, *section)
    named = ("routeguard:", "  protect: l2_sp", "  restore: average")
    assert examine(axolotl, recipe="max_recall").recipe == ("# in the config", plugin, *named)
    factory = write(model_name_or_path="no-such/model", finetuning_type="full")
    command = "python -m routeguard.integrations.llamafactory CONFIG"
    assert examine(factory).recipe == (command,)
    assert examine(factory, protect="track").recipe[1:3] == ("routeguard:", "  protect: track")
    trl = write("trl.yaml", model_name_or_path="no-such/model")
    pointed = "takes no callback"  # `trl sft`, whose config this is
    assert pointed in examine(trl).recipe[0] and pointed not in examine(write(learning_rate=1e-5)).recipe[0]
    assert examine(trl, **chosen).recipe[-3:] == (
        "from routeguard import Average, RouteGuard",
        "",
        "trainer = SFTTrainer(..., callbacks=[RouteGuard(protect='track', restore=Average(alpha=0.25))])",
    )


def test_the_guard_of_the_config_is_looked_at(folders: Any, write: Write) -> None:
    common = {"base_model": str(folders("lfm2")), "learning_rate": 1e-5}
    common["plugins"] = ["routeguard.integrations.axolotl.RouteGuardPlugin"]
    config = write(**common, routeguard={"protect": {"mode": "low_lr", "scale": 0.02}, "layers": [5]})
    report = examine(config)
    assert "learn at 0.02 x" in texts(report, "ok", "guard") and report.held["layers"] == [5]
    assert "not looked at" not in texts(report, "note", "config") and "routeguard:" not in report.recipe
    asked = examine(config, protect="track")
    assert asked.held["layers"] == [2, 5] and "routeguard:" in asked.recipe
    other = write(**{**common, "plugins": ["another.Plugin"]}, routeguard={"protct": "freeze"})
    with pytest.raises(ValueError, match="closest 'protect'"):
        examine(other)
    asked = examine(other, protect="freeze")
    assert "not looked at: plugin another.Plugin" in texts(asked, "note", "config")
    assert "the section routeguard does nothing" in texts(asked, "error", "config") and not asked.ok
    both = examine(write(**{**common, "plugins": ["another.Plugin", *common["plugins"]]}, routeguard={}))
    assert both.ok and "not looked at: plugin another.Plugin" in texts(both, "note", "config")
    assert both.recipe[1].startswith("plugins: [another.Plugin, routeguard.")
    probed = write("probed.yaml", **common, fsdp_version=2, fsdp_config={"x": 1}, routeguard={"probe": {}})
    assert "RecallProbe is not supported" in texts(examine(probed), "error", "recall")
