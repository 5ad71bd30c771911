"""Which of a config's adapters sit on the queries and keys of full attention, and what to ask PEFT for instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routeguard.doctor.findings import Finding
from routeguard.doctor.settings import Tool
from routeguard.protect.lora_coverage import few_layers, lora_coverage
from routeguard.protect.lora_report import places
from routeguard.protect.lora_targets import LoraTargets, lora_targets
from routeguard.protect.modes import Freeze, Protection


def targets_beside_routing(model: Any) -> tuple[LoraTargets | None, list[Finding]]:
    """The adapters that leave routing alone, for the model before PEFT wraps it."""
    try:
        return lora_targets(model), []
    except ValueError as error:
        return None, [Finding("note", "adapters", f"no adapters beside queries and keys can be named: {error}")]


@dataclass(frozen=True)
class AdapterCheck:
    """Findings about a config's adapters, and whether some of them would be frozen whole, and so wasted."""

    findings: tuple[Finding, ...]
    wasted: bool = False


def check_adapters(wrapped: Any, targets: LoraTargets | None, protect: Protection, tool: Tool) -> AdapterCheck:
    """What the config's adapters reach, and what the guard does about those on queries and keys.

    Args:
        wrapped: the model with its adapters.
        targets: of `targets_beside_routing`, to be named as the way out.
        protect: the protection that is asked for.
        tool: whose config it is, for the spelling of the way out.
    """
    try:
        coverage = lora_coverage(wrapped)
    except ValueError as error:
        return AdapterCheck((Finding("error", "adapters", str(error)),))
    findings = [Finding("ok", "adapters", str(coverage))]
    few = few_layers(wrapped, coverage)
    if few is not None:
        findings.append(Finding("warning", "adapters", few))
    on = [m for m in coverage.adapted if m.num_routing_rows]
    whole = [m for m in on if m.num_routing_rows == m.num_rows]
    part = [m for m in on if m not in whole]
    wasted = bool(whole) and isinstance(protect, Freeze)
    if not on:
        text = "none sits on the queries and keys of full attention, so those stand still anyway"
        findings.append(Finding("ok", "adapters", text))
    elif not isinstance(protect, Freeze):
        text = f"those on queries and keys ({places(on)}) are what {protect.name} acts on or logs"
        findings.append(Finding("note", "adapters", text))
    if wasted:
        text = f"those on {places(whole)} will be frozen: they take memory and do nothing"
        findings.append(Finding("warning", "adapters", text, _way_out(targets, tool)))
    if part and isinstance(protect, Freeze):
        text = f"those on {places(part)} will be frozen in the rows of queries and keys; their other rows train"
        findings.append(Finding("note", "adapters", text))
    return AdapterCheck(tuple(findings), wasted)


def _way_out(targets: LoraTargets | None, tool: Tool) -> str:
    if targets is None:
        return ""
    if tool == "llama-factory":
        return "leave them: lora_target is a list of last names, which cannot tell full-attention layers from others"
    return "leave them out: lora_config(model) in Python, or the lines for the config at the end"


def target_lines(targets: LoraTargets, tool: Tool) -> list[str]:
    """Lines of a config that put adapters everywhere but on queries and keys."""
    if tool == "llama-factory":
        return []  # its `lora_target` is a list of last names, which cannot tell layers apart
    if tool == "axolotl":
        return ["lora_target_linear: false", f"lora_target_modules: '{targets.target_modules}'"]
    return [f"lora_target_modules: ['{targets.target_modules}']"]
