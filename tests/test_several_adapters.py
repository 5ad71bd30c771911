"""Models with several adapters: only the active one is guarded, restored and compared, and each with its own start."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from routeguard import (
    QKRestore,
    RouteGuard,
    Track,
    check_lora_coverage,
    find_routes,
    freeze,
    restore,
    restore_checkpoint,
    verify_checkpoint,
)
from routeguard.drift.record import read_drift
from tests.loops import tiny
from tests.test_verify_checkpoint import keep
from tests.trainers import run
from tests.tuned import tune, values
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")

ON_ROUTES = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
COPIES = {"target_modules": ["v_proj"], "modules_to_save": ["q_proj", "k_proj"]}


def with_two(base: nn.Module, active: str = "default", **options: Any) -> Any:
    """A PEFT model with the adapters "default" and "second"."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, **options)
    model = get_peft_model(base, config)
    model.add_adapter("second", config)
    model.set_adapter(active)
    return model


def two_trained(**options: Any) -> Any:
    """Two adapters that are both off zero, and apart."""
    model = with_two(build("llama"), **(options or ON_ROUTES))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def of_copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in values(model).items() if "modules_to_save" in name}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    now = dict(model.named_parameters())
    return {name for name, value in before.items() if not torch.equal(now[name], value)}


@pytest.mark.parametrize("active", ["default", "second"])
def test_the_active_copy_of_a_module_is_the_route(active: str) -> None:
    model = with_two(build("llama"), active, **COPIES)
    assert all(f"modules_to_save.{active}." in name for name in find_routes(model).parameters)
    model.set_adapter("second" if active == "default" else "default")
    assert not any(f"modules_to_save.{active}." in name for name in find_routes(model).parameters)


def test_without_an_active_copy_the_base_is_the_route() -> None:
    model = get_peft_model(build("llama"), LoraConfig(r=4, **COPIES))
    model.add_adapter("second", LoraConfig(r=4, target_modules=["v_proj"]))
    model.set_adapter("second")
    assert all(".original_module." in name for name in find_routes(model).parameters)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "q_proj.original_module" in name:
                parameter += 1
    tuned = of_copies(model)
    assert any(layer.changed_bytes for layer in restore(model, build("llama")).layers)
    assert not moved(model, tuned)  # the model does not use the copies


def test_freeze_holds_the_active_copies() -> None:
    model = with_two(build("llama"), **COPIES)
    frozen = freeze(model, find_routes(model))
    assert len(frozen.whole) == 8 and not frozen.before
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "modules_to_save" in name)


@pytest.mark.parametrize("mode", ["freeze", "track"])
def test_the_guard_holds_and_measures_the_active_copies(mode: str, tmp_path: Path) -> None:
    model = with_two(tiny("llama"), **COPIES).train()
    before = of_copies(model)
    run(model, tmp_path, RouteGuard() if mode == "freeze" else RouteGuard(Track()))
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    drift = max(samples[-1].factors.values())
    if mode == "freeze":
        assert not moved(model, before) and drift == 0
    else:
        assert moved(model, before) == {name for name in before if ".default." in name} and drift > 0


def test_restore_writes_the_active_copies_only() -> None:
    model = with_two(build("llama"), **COPIES)
    start = copy.deepcopy(model)
    tune(model)
    tuned = of_copies(model)
    report = restore(model, build("llama"))
    assert all(layer.changed_bytes for layer in report.layers)
    assert moved(model, tuned) == {name for name in tuned if ".default." in name}
    first = of_copies(start)
    assert not moved(model, {name: value for name, value in first.items() if ".default." in name})


@pytest.mark.parametrize("active", ["default", "second"])
@pytest.mark.parametrize("kind", ["model", "state dict"])
def test_a_start_with_several_copies_gives_the_active_one(kind: str, active: str) -> None:
    start = with_two(build("llama"), active, **COPIES)
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if "modules_to_save" in name:
                parameter.fill_(1.0 if ".default." in name else 2.0)
    model = copy.deepcopy(start)
    tune(model)
    restore(model, start if kind == "model" else start.state_dict())
    written = dict(model.named_parameters())
    for name in find_routes(model).parameters:
        assert (written[name] == (1.0 if active == "default" else 2.0)).all()


def test_a_state_dict_that_does_not_say_which_copy_is_refused() -> None:
    state = with_two(build("llama"), **COPIES).state_dict()
    with pytest.raises(ValueError, match=r"a copy of .*q_proj.weight for each of the adapters default, second"):
        restore(build("llama"), state)
    kept = {name: value for name, value in state.items() if ".second." not in name}
    restore(build("llama"), kept)


def test_a_trainable_copy_of_an_idle_adapter_is_refused() -> None:
    model = with_two(build("llama"), **COPIES)
    for name, parameter in model.named_parameters():
        if "modules_to_save.second" in name and "k_proj" in name:
            parameter.requires_grad_(True)
    with pytest.raises(ValueError, match=r"k_proj.modules_to_save.second.weight is trainable, .* is not active"):
        freeze(model, find_routes(model))


def test_coverage_sees_trainable_copies_of_any_adapter() -> None:
    model = with_two(build("llama"), **COPIES)
    with pytest.raises(ValueError, match="8 query or key tensors of full attention would be trained"):
        check_lora_coverage(model, quiet=True)
    freeze(model, find_routes(model))
    check_lora_coverage(model, quiet=True)
    model.get_parameter(find_routes(model).parameters[0].replace(".default.", ".second.")).requires_grad_(True)
    with pytest.raises(ValueError, match="1 query or key tensors of full attention would be trained"):
        check_lora_coverage(model, quiet=True)


# -- in memory, beside another adapter -------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["default", "second"])
@pytest.mark.parametrize("source", ["base", "folder", "start"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=str)
def test_restore_leaves_idle_adapters_alone(options: dict[str, Any], source: str, adapter: str, tmp_path: Path) -> None:
    start = two_trained(**ON_ROUTES, **options)
    start.set_adapter(adapter)
    start.save_pretrained(tmp_path)
    model = copy.deepcopy(start)
    tune(model)
    before = values(model)
    folder = tmp_path if adapter == "default" else tmp_path / adapter
    report = restore(model, {"base": build("llama"), "folder": folder, "start": start}[source])
    changed = moved(model, before)
    assert changed and all(f".{adapter}." in name for name in changed)
    assert "adapters second" in str(report) if adapter == "default" else "adapters default" in str(report)
    if source != "base":
        routed = [name for name in values(start) if f".{adapter}." in name and "v_proj" not in name]
        assert not moved(model, {name: values(start)[name] for name in routed})


def test_the_drift_that_restore_reports_is_that_of_the_active_adapter() -> None:
    both, alone = two_trained(), two_trained()
    alone.delete_adapter("second")
    drifts = [[layer.drift_before for layer in restore(m, build("llama")).layers] for m in (both, alone)]
    assert drifts[0] == drifts[1] and min(drifts[0][0].values()) > 0


def test_an_ia3_adapter_that_is_idle_stays() -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    start = get_peft_model(build("llama"), config)
    start.add_adapter("second", config)
    start.set_adapter("default")
    model = copy.deepcopy(start)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ia3_l" in name:
                parameter += 1
    before = values(model)
    restore(model, start)
    changed = moved(model, before)
    assert changed == {name for name in before if "ia3_l.default" in name}


def test_one_adapter_is_not_the_start_of_two(tmp_path: Path) -> None:
    model = two_trained()
    model.save_pretrained(tmp_path)
    model.base_model.set_adapter(["default", "second"])
    before = values(model)
    with pytest.raises(ValueError, match=r"holds one adapter .*several active \(default, second\)"):
        restore(model, tmp_path)
    assert not moved(model, before)
    restore(model, build("llama"))
    assert all(".lora_B." in name for name in moved(model, before))


def test_the_end_of_a_guarded_run_leaves_idle_adapters_alone(tmp_path: Path) -> None:
    model = two_trained().train()
    model.save_pretrained(tmp_path / "start")
    before = values(model)
    run(model, tmp_path / "run", RouteGuard(Track(), QKRestore(), reference=tmp_path / "start"))
    changed = moved(model, before)
    assert changed == {name for name in before if ".lora_" in name and ".default." in name and "v_proj" in name}


# -- on disk, against what a run kept --------------------------------------------------------------------------------


def only(model: Any, adapter: str, folder: Path) -> Path:
    """One adapter's folder, away from the others."""
    model.save_pretrained(folder, selected_adapters=[adapter])
    return folder if adapter == "default" else folder / adapter


@pytest.mark.parametrize("adapter", ["default", "second"])
def test_each_folder_is_compared_with_its_own_start(adapter: str, tmp_path: Path) -> None:
    model = two_trained()
    keep(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "start")
    folder = Path("." if adapter == "default" else "second")
    assert verify_checkpoint(tmp_path / "start" / folder, tmp_path / "run").ok
    model.set_adapter(adapter)
    tune(model)
    model.save_pretrained(tmp_path / "tuned")
    assert not verify_checkpoint(tmp_path / "tuned" / folder, tmp_path / "run").ok
    restore_checkpoint(tmp_path / "run", tmp_path / "tuned" / folder, out=tmp_path / "out" / folder)
    assert verify_checkpoint(tmp_path / "out" / folder, tmp_path / "run").ok
    start, found = (load_file(tmp_path / at / folder / "adapter_model.safetensors") for at in ("start", "out"))
    for name in found:
        assert torch.equal(found[name], start[name]) == ("v_proj" not in name), name


def test_the_start_of_another_adapter_is_a_change(tmp_path: Path) -> None:
    model = two_trained()
    keep(model, tmp_path / "run")
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            if ".default." in name:
                parameter.copy_(named[name.replace(".default.", ".second.")])
    model.save_pretrained(tmp_path / "tuned")
    report = verify_checkpoint(tmp_path / "tuned", tmp_path / "run")
    assert len(report.mismatches) == len(report.checks) == 16


def test_a_folder_that_does_not_tell_its_adapter_is_refused(tmp_path: Path) -> None:
    model = two_trained()
    sidecar = keep(model, tmp_path / "run")
    alone = only(model, "default", tmp_path / "alone")
    message = r"holds the start of the adapters default, second, and .*alone does not tell which"
    with pytest.raises(ValueError, match=message):
        verify_checkpoint(alone, sidecar)
    with pytest.raises(ValueError, match=message):
        restore_checkpoint(sidecar, alone, out=tmp_path / "out")
    assert verify_checkpoint(only(model, "second", tmp_path / "other"), sidecar).ok
    keep(model, alone)  # the folder of the run itself
    assert verify_checkpoint(alone, sidecar).ok


def test_a_trained_adapter_that_is_not_active_is_no_obstacle(tmp_path: Path) -> None:
    """A reference policy's adapter beside a fresh one: only the active one has a start to be asked for."""
    tiny("llama").save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj"])
    torch.manual_seed(0)
    model = get_peft_model(tiny("llama"), config)
    model.add_adapter("reference", config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B.reference." in name:
                parameter.fill_(0.1)
    run(model, tmp_path / "own", RouteGuard("track"))
    for name, parameter in model.named_parameters():
        if ".lora_B.default." in name:
            parameter.data.zero_()
    run(model, tmp_path / "named", RouteGuard("track", reference=str(tmp_path / "base")))
    model.set_adapter("reference")
    with pytest.raises(ValueError, match=r"holds no start of .*lora_B\.reference"):
        run(model, tmp_path / "other", RouteGuard("track", reference=str(tmp_path / "base")))


def test_routes_of_the_bare_model_do_not_fit_the_adapted_one() -> None:
    base = tiny("llama")
    routes = find_routes(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"which this model does not have .* find_routes on this very model"):
        freeze(model, routes)
