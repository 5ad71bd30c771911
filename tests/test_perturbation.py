"""The second check of a probe, noise on rows, is able to disagree with it."""

from __future__ import annotations

from dataclasses import replace

from routeguard.routes.probe import ProbeResult, probe_routes
from tests.perturbation import perturbation_check
from tests.zoo.build import build


def tampered(result: ProbeResult, name: str, **rows: tuple[tuple[int, int], ...]) -> ProbeResult:
    (block,) = result.blocks[-1:]
    tensors = tuple(replace(t, **rows) if t.parameter.endswith(name) else t for t in block.tensors)
    assert tensors != block.tensors
    return replace(result, blocks=(replace(block, tensors=tensors),))


def test_perturbation_finds_rows_that_are_missing_and_rows_that_do_nothing() -> None:
    model = build("qwen3_next")
    result = probe_routes(model)
    assert perturbation_check(model, result).agrees
    missing = perturbation_check(model, tampered(result, "k_proj.weight", key_rows=((0, 31),)))
    assert missing.leaks == ("model.layers.3.self_attn: model.layers.3.self_attn.k_proj.weight",)
    gate = perturbation_check(model, tampered(result, "q_proj.weight", query_rows=((0, 128),)), rows_per_range=8)
    assert gate.inert and not gate.leaks and not gate.agrees
    absent = replace(result, blocks=(replace(result.blocks[0], module="model.layers.0.linear_attn"),))
    assert perturbation_check(model, absent).unchecked


def test_perturbation_attributes_selectors() -> None:
    model = build("deepseek_v32")
    result = probe_routes(model)
    report = perturbation_check(model, result)
    assert report.agrees and report.steering
    blind = replace(result, blocks=tuple(replace(block, selectors=()) for block in result.blocks))
    assert perturbation_check(model, blind).leaks == report.steering
