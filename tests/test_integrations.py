"""Settings of a config become a guard, mistakes are refused; with the tools: test_integrations_tools.py."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from routeguard import L2SP, Anchor, Average, Freeze, Interpolate, LowLR, QKRestore, RouteGuard, Track, find_routes
from routeguard.demo.model import WEIGHTS
from routeguard.integrations.llamafactory import split_config
from routeguard.integrations.settings import guard_from_settings
from tests.docs_pages import ROOT, blocks, wrong_names

PAGE = "docs/integrations.md"
PYTHON_NOT_RUN = [block for block in blocks(PAGE) if block.language == "py"]


@pytest.mark.parametrize(
    ("text", "protect", "restore"),
    [
        ("", Freeze(), None),
        ("protect: freeze", Freeze(), None),
        ("{protect: track, restore: qk}", Track(), QKRestore()),
        ("recipe: balanced", L2SP(0.9), None),
        ("recipe: max_recall", L2SP(0.9), Average(0.1)),
        ("protect: {mode: low_lr, scale: 0.05}", LowLR(0.05), None),
        ("protect: {mode: anchor, strength: 1e1}", Anchor(10.0), None),  # a text, as YAML reads it
        ("protect: {mode: anchor}", Anchor(), None),
        ("protect: l2_sp", L2SP(), None),
        ("protect: {mode: l2_sp, total: 0.5}", L2SP(0.5), None),
        ("{protect: track, restore: {mode: average, alpha: 0.2}}", Track(), Average(0.2)),
        ("{protect: track, restore: {mode: interpolate, alpha: 1}}", Track(), Interpolate(1.0)),
    ],
)
def test_a_section_becomes_a_guard(text: str, protect: Any, restore: Any) -> None:
    guard = guard_from_settings(yaml.safe_load(text))
    assert isinstance(guard, RouteGuard)
    assert (guard.protect, guard.restore) == (protect, restore)


def test_the_page_lists_every_protection_and_its_options() -> None:
    row = next(line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("| `protect` |"))
    for mode in (Freeze, LowLR, Anchor, L2SP, Track):
        assert f"`{mode.name}`" in row
        assert all(f"`{option.name}` of `{mode.name}`" in row for option in fields(mode))


def test_the_other_arguments_arrive() -> None:
    section = """
        layers: [3, 7]
        roles: query, key
        norms: true
        insist: true
        reference: path/of/base
        probe: {every: 50, lengths: [512], share: 0.02, max_drop: 0.1, action: stop}
    """
    guard = guard_from_settings(yaml.safe_load(section))
    assert (guard.layers, guard.roles, guard.norms, guard.insist) == ((3, 7), ("query", "key"), True, True)
    assert guard.reference == "path/of/base"
    assert guard.probe is not None
    assert (guard.probe.every, guard.probe.lengths, guard.probe.action) == (50, (512,), "stop")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("protct: freeze", r"routeguard: key 'protct' is not understood; closest 'protect'; choose from protect, "),
        ("protect: freze", r"closest 'freeze'"),
        ("recipe: balance", r"closest 'balanced'"),
        ("protect: off", r"protect=False is not understood"),
        ("{recipe: balanced, protect: freeze}", r"recipe='balanced' chooses protect and restore itself"),
        ("{protect: freeze, restore: qk}", r"meaningless"),
        ("protect: {scale: 0.1}", r"routeguard.protect is .* without the key `mode`"),
        (
            "protect: {mode: low_lr, scal: 0.1}",
            r"routeguard.protect: key 'scal' .* closest 'scale'; choose from mode, sc",
        ),
        ("protect: {mode: low_lr, scale: small}", r"routeguard.protect: scale is 'small', not a number"),
        ("protect: {mode: low_lr, scale: 2}", r"between 0 and 1"),
        ("protect: {mode: freeze, scale: 2}", r"choose from mode$"),
        ("restore: {mode: averge, alpha: 0.1}", r"closest 'average'"),
        ("layers: 3", r"layers is 3, not a list of layer indices"),
        ("layers: [true]", r"not a list of layer indices"),
        ("norms: sometimes", r"norms is 'sometimes', not true or false"),
        ("roles: 3", r"roles is 3, not a list of names"),
        ("roles: [query, kye]", r"roles has 'kye'; choose from query, key"),
        ("reference: [a]", r"reference is \['a'\], not a text"),
        ("probe: {evry: 5}", r"routeguard.probe: key 'evry' .* closest 'every'"),
        ("probe: {share: 1e-2}", r"routeguard.probe: .* wrong kind"),
        ("probe: true", r"routeguard.probe is True, not a mapping"),
        ("freeze", r"routeguard is 'freeze', not a mapping"),
    ],
)
def test_mistakes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        guard_from_settings(yaml.safe_load(text))


def test_llama_factory_gets_its_own_keys_and_the_guard_the_section() -> None:
    config, guard = split_config({"model_name_or_path": "m", "routeguard": {"protect": "track"}})
    assert (config, guard.protect) == ({"model_name_or_path": "m"}, Track())
    assert split_config({"model_name_or_path": "m"})[1].protect == Freeze()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["--stage", "sft"], "YAML"),
        ({"routeguard": {"protct": "track"}}, "closest 'protect'"),
        ({"use_ray": True}, "use_ray trains elsewhere"),
    ],
)
def test_llama_factory_configs_that_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_config(config)


def test_llama_factory_trainers_by_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_MCA", "1")
    with pytest.raises(ValueError, match="use_mca"):
        split_config({})


@pytest.mark.parametrize(
    ("module", "package"), [("axolotl", "axolotl.integrations.base"), ("swift", "swift.callbacks")]
)
def test_an_absent_tool_is_named(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"routeguard.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"routeguard.integrations.{module} .* cannot be imported here"):
        __import__(f"routeguard.integrations.{module}")


def test_an_absent_llama_factory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from routeguard.integrations import llamafactory

    monkeypatch.setitem(sys.modules, "llamafactory.hparams", None)
    with pytest.raises(ImportError, match="LLaMA-Factory, which cannot be imported here"):
        llamafactory.main()


def _stand_in(monkeypatch: pytest.MonkeyPatch, tool: str, name: str, **contents: Any) -> Any:
    """Our module for a tool, imported over a module of the tool's that has only these contents."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:number]), ModuleType(".".join(parts[:number])))
    vars(sys.modules[name]).update(contents)
    monkeypatch.delitem(sys.modules, f"routeguard.integrations.{tool}", raising=False)
    module = __import__(f"routeguard.integrations.{tool}", fromlist=["*"])
    monkeypatch.delitem(sys.modules, f"routeguard.integrations.{tool}")  # so that no stand-in stays behind
    return module


def test_the_axolotl_plugin_makes_a_guard_of_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _stand_in(monkeypatch, "axolotl", "axolotl.integrations.base", BasePlugin=object)
    plugin = module.RouteGuardPlugin()
    (guard,) = plugin.add_callbacks_pre_trainer({"routeguard": {"recipe": "balanced"}}, None)
    assert (guard.protect, guard.restore) == (L2SP(), None)
    (guard,) = plugin.add_callbacks_pre_trainer({}, None)
    assert guard.protect == Freeze()
    with pytest.raises(ValueError, match="closest 'protect'"):
        plugin.register({"routeguard": {"protct": "track"}})
    assert plugin.get_input_args() == "routeguard.integrations.axolotl.RouteGuardArguments"
    assert module.RouteGuardArguments(routeguard={"protect": "track"}).routeguard == {"protect": "track"}


def test_swift_gets_a_new_guard_for_every_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: dict[str, Any] = {}
    module = _stand_in(monkeypatch, "swift", "swift.callbacks", callbacks_map=callbacks)
    module.register(protect="track", restore="qk")
    first, second = (callbacks["routeguard"](None, None) for _ in range(2))
    assert first is not second
    assert (first.protect, first.restore) == (Track(), QKRestore())
    with pytest.raises(ValueError, match="closest 'track'"):
        module.register(protect="trak")


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", PYTHON_NOT_RUN, ids=str)
def test_python_that_cannot_run_without_its_tool_names_what_exists(block: Any) -> None:
    ast.parse(block.code)
    code = re.sub(r"^from routeguard\.integrations\.swift import register$", "", block.code, flags=re.MULTILINE)
    assert not wrong_names(code, {"register": RouteGuard})


@pytest.fixture
def trl_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs the page's script for configs of `trl sft` over the demo's model: the folder that it wrote."""
    (block,) = (block for block in PYTHON_NOT_RUN if block.code.startswith("# guarded_sft.py"))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text('{"text": "let k07 3 = 3 ; let k08 k07 + 1 = 4 ;"}\n' * 16)

    def run(**settings: Any) -> Path:
        common = {"model_name_or_path": str(WEIGHTS), "dataset_name": str(tmp_path / "data"), "max_steps": 2}
        common |= {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "report_to": "none"}
        config = tmp_path / "sft.yaml"
        config.write_text(yaml.safe_dump({**common, "learning_rate": 1e-3, "save_strategy": "no", **settings}))
        monkeypatch.setattr(sys, "argv", ["guarded_sft.py", "--config", str(config)])
        exec(compile(block.code, "guarded_sft.py", "exec"), {"__name__": "__main__"})
        return tmp_path / "out"

    return run


@pytest.mark.filterwarnings("ignore")
def test_the_script_for_trl_guards_a_config(trl_script: Callable[..., Path]) -> None:
    out = trl_script(dtype="float32")
    start, tuned = load_file(WEIGHTS / "model.safetensors"), load_file(out / "model.safetensors")
    held = set(find_routes(WEIGHTS).parameters)
    assert all(torch.equal(start[name], tuned[name]) == (name in held) for name in tuned)
    assert (out / "routeguard").is_dir()
    with pytest.raises(ValueError, match="banana"):
        trl_script(banana=3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_the_script_for_trl_quantises_and_evaluates(
    trl_script: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 4, "load_in_4bit": True}
    out = trl_script(**adapters, eval_strategy="steps", eval_steps=1)
    moved = {
        name: bool(b.any()) for name, b in load_file(out / "adapter_model.safetensors").items() if "lora_B" in name
    }
    held = {name: name.endswith(("q_proj.lora_B.weight", "k_proj.lora_B.weight")) for name in moved}
    assert sum(held.values()) == 4 and all(moved[name] != held[name] for name in moved)
    printed = capsys.readouterr().out
    assert "eval_loss" in printed and "12.0 KiB" in printed  # of 48 KiB in float32


def test_sections_on_the_page_are_understood() -> None:
    found = [yaml.safe_load(block.code) for block in blocks(PAGE) if block.language == "yaml"]
    sections = [content["routeguard"] for content in found if "routeguard" in content]
    assert len(sections) >= 2
    for section in sections:
        guard_from_settings(section)


@pytest.mark.parametrize(
    ("tool", "file"), [("axolotl", "axolotl"), ("ms_swift", "swift"), ("llamafactory", "llamafactory")]
)
def test_versions_on_the_page_are_the_ones_that_are_pinned(tool: str, file: str) -> None:
    pins = dict(line.split("==") for line in (ROOT / f"tests/tools/requirements-{file}.txt").read_text("utf-8").split())
    assert f"| {pins[tool]} |" in (ROOT / PAGE).read_text("utf-8")
