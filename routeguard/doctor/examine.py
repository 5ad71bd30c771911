"""Examine a run before it starts: the environment, its config, its model, and what the guard would do to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeguard.doctor.environment import check_environment, missing_extra
from routeguard.doctor.findings import Finding, Report, collecting, listed
from routeguard.doctor.read_config import read_settings
from routeguard.doctor.settings import TrainingSettings
from routeguard.protect.modes import AtEnd, Protection
from routeguard.protect.recipes import Recipe, choose
from routeguard.routes.collection import Routes
from routeguard.storage.folder import checkpoint_config, holds_model, quantisation_of, tokenizer_files
from routeguard.storage.hub import cached_folder

if TYPE_CHECKING:
    from routeguard.training.guard import RouteGuard


def examine(
    config: Path | None = None,
    *,
    model: str | Path | None = None,
    protect: str | Protection | None = None,
    restore: str | AtEnd | None = None,
    recipe: str | None = None,
) -> Report:
    """Say what a guard would do, without training, without loading weights, and without the network.

    Args:
        config: training config of TRL's command line, axolotl or LLaMA-Factory. None: full fine-tuning with
            `SFTTrainer`'s defaults.
        model: a checkpoint folder, or a Hub id in the local cache. Default: the one that the config names.
        protect, restore, recipe: as for `RouteGuard`. Default: the section `routeguard` of the config, else freeze.

    Raises:
        ValueError: a config that is not understood, a `model` that is not here, or a protection that makes no sense.
    """
    choose(protect, restore, recipe)  # refused before anything is looked at
    findings = check_environment()
    if config is None and model is None:
        return Report(tuple(findings))
    if any(finding.level == "error" for finding in findings):
        findings.append(Finding("note", "config", "not looked at: the environment has to be put right first"))
        return Report(tuple(findings))
    from routeguard.quiet_libraries import quiet_libraries

    with quiet_libraries():
        settings = TrainingSettings() if config is None else read_settings(config)
        if (protect, restore, recipe) != (None, None, None):
            settings = replace(settings, guard=None)  # another guard than the config's is asked about
        findings += _config_findings(settings, config)
        guard = _guard(settings, protect, restore, recipe)
        findings += _engine_findings(settings, guard)
        folder = _folder(model, settings, findings)
        report = Report(tuple(findings), settings=settings.to_dict())
        return (
            _with_recipe(report, settings, guard, None) if folder is None else _model(report, folder, settings, guard)
        )


def _guard(
    settings: TrainingSettings, protect: str | Protection | None, restore: str | AtEnd | None, recipe: str | None
) -> RouteGuard:
    """The guard that was asked for, or else that of the config, or else the default."""
    from routeguard.training.guard import RouteGuard

    if settings.guard is None:
        return RouteGuard(*choose(protect, restore, recipe))
    from routeguard.integrations.settings import guard_from_settings

    return guard_from_settings(settings.guard)


def _config_findings(settings: TrainingSettings, config: Path | None) -> list[Finding]:
    findings = [Finding("error", "config", problem) for problem in settings.problems]
    if config is not None:
        tuning = "full fine-tuning" if settings.adapter is None else f"LoRA of rank {settings.adapter.rank}"
        base = f", base in {settings.quantised_bits} bits" if settings.quantised_bits is not None else ""
        engine = "" if settings.engine is None else f", {settings.engine.name}"
        text = (
            f"read as one of {settings.tool}: {tuning}{base}, trained weights in {settings.dtype}, "
            f"{settings.optimizer} at {settings.learning_rate:g}{engine}"
        )
        findings.insert(0, Finding("ok", "config", text))
    if config is not None and settings.engine is None:
        text = "the config names none (one device, or DDP); what an accelerate config adds is not seen here"
        advice = "with FSDP or DeepSpeed there, put its settings into a copy of the config"
        findings.append(Finding("note", "engine", text, advice))
    if settings.unlooked:
        findings.append(
            Finding(
                "note", "config", f"not looked at: {listed(settings.unlooked)}", "check that none changes what trains"
            )
        )
    needs = ["deepspeed"] if settings.deepspeed is not None else []
    needs += ["bitsandbytes"] if settings.quantised_bits is not None else []
    return findings + [finding for need in needs for finding in [missing_extra(need)] if finding is not None]


def _engine_findings(settings: TrainingSettings, guard: RouteGuard) -> list[Finding]:
    import torch

    from routeguard.doctor.rehearsal import rehearse_engine

    chosen = Recipe(guard.protect, guard.restore)
    findings = rehearse_engine(settings, chosen, probed=guard.probe is not None)
    if settings.mixed_precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        findings.append(
            Finding(
                "warning", "engine", "the run computes in bf16, which the GPU here does not", "train elsewhere, or fp16"
            )
        )
    return findings


def _folder(model: str | Path | None, settings: TrainingSettings, findings: list[Finding]) -> Path | None:
    """Where the model is; None, and a finding, where the config's model is not here."""
    wanted = model if model is not None else settings.model
    if wanted is None:
        findings.append(Finding("note", "model", "the config names none", "--model FOLDER"))
        return None
    folder = cached_folder(wanted)
    if folder is not None:
        return folder
    if model is not None:
        raise ValueError(f"{model} is neither a folder nor a model id in the local cache; nothing is downloaded")
    findings.append(
        Finding(
            "warning",
            "model",
            f"{wanted} is neither a folder nor in the local cache, so nothing about it was looked at",
            "give --model FOLDER, or fetch it first (its config.json is enough)",
        )
    )
    return None


def _model(report: Report, folder: Path, settings: TrainingSettings, guard: RouteGuard) -> Report:
    from routeguard.doctor.adapters import check_adapters, targets_beside_routing
    from routeguard.doctor.empty_model import adapted, empty_model
    from routeguard.doctor.rehearsal import rehearse_guard

    findings = list(report.findings)
    findings += _quantised(folder, settings)
    on_disk = _headers(folder, findings)
    findings.append(_recall(folder))
    targets, lora = None, {}
    try:
        model = empty_model(folder, settings)
    except ValueError as error:
        advice = "optimizer and adapters were not tried; the guard says before the first step what it holds"
        findings.append(Finding("warning", "model", str(error), advice))
        if on_disk is not None:
            findings.append(Finding("ok", "model", str(on_disk)))
        return _with_recipe(replace(report, findings=tuple(findings), held=_held(on_disk)), settings, guard, None)
    if settings.adapter is not None:
        targets, more = targets_beside_routing(model)
        findings += more
        if targets is not None:
            lora = {"target_modules": targets.target_modules, "exclude_modules": targets.exclude_modules}
        errors = len(findings)
        with collecting(findings, "adapters"):
            model = adapted(model, settings.adapter, settings)
        if len(findings) == errors:
            coverage = check_adapters(model, targets, guard.protect, settings.tool)
            findings += coverage.findings
            targets = targets if coverage.wasted else None
    routes, more = rehearse_guard(model, settings, guard)
    said = {finding.text for finding in findings}
    findings += [finding for finding in more if finding.text not in said]
    report = replace(report, findings=tuple(findings), held=_held(routes or on_disk), lora=lora)
    return _with_recipe(report, settings, guard, targets)


def _headers(folder: Path, findings: list[Finding]) -> Routes | None:
    """The routes of the checkpoint on disk; what cannot be read of it is a finding."""
    from routeguard.routes.find import find_on_disk

    if not holds_model(folder):
        findings.append(Finding("note", "model", f"{folder} holds no safetensors; only its config was looked at"))
        return None
    with collecting(findings, "model"):
        return find_on_disk(folder, {})
    return None


def _quantised(folder: Path, settings: TrainingSettings) -> list[Finding]:
    method = quantisation_of(checkpoint_config(folder))
    if not method:
        return []
    text = f"the checkpoint is stored quantised ({method})"
    if settings.adapter is not None:
        return [Finding("note", "model", text)]
    return [
        Finding("warning", "model", text, "full fine-tuning of quantised weights is refused: dequantise, or add LoRA")
    ]


def _held(routes: Routes | None) -> dict[str, Any]:
    if routes is None:
        return {}
    return {
        "model_type": routes.model_type,
        "layers": list(routes.layers),
        "num_layers": len(routes.layer_kinds),
        "num_tensors": len(routes.parameters),
        "num_parameters": routes.num_parameters,
        "num_bytes": routes.num_bytes,
        "share": routes.share,
        "notes": list(routes.notes),
    }


def _recall(folder: Path) -> Finding:
    if tokenizer_files(folder):
        return Finding("ok", "recall", "a tokenizer is there, so recall can be measured")
    return Finding("note", "recall", f"no tokenizer in {folder}", "RecallProbe and `routeguard recall` need one")


def _with_recipe(report: Report, settings: TrainingSettings, guard: RouteGuard, targets: Any) -> Report:
    from routeguard.doctor.recipe import recipe_lines

    lines = recipe_lines(settings, Recipe(guard.protect, guard.restore), targets)
    return replace(report, recipe=lines) if report.ok else report
