"""The autograd probe over every decoder family, against the layer kinds of the config and against noise on rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from routeguard.routes.probe import ProbeResult, probe_routes
from tests.perturbation import perturbation_check
from tests.zoo.build import CASES, build, example_inputs

GLOBAL = {"full_attention", "indexed_attention", "minimax_m3_sparse", "hybrid"}
GLOBAL |= {"compressed_sparse_attention", "heavily_compressed_attention"}  # through compressed keys
GLOBAL |= {"reference_sliding_attention"}  # windowed over tokens that are generated later only
LIMITED = {"sliding_attention", "chunked_attention", "hybrid_sliding"}
NOT_SOFTMAX = {"linear_attention", "conv", "moe", "mlp"}
# A set sliding_window limits what the config calls full.
MISLABELLED = {"minimax/window": {0: False, 2: False, 4: False}}
RUNNING = [name for name, case in CASES.items() if case.forward]


def probed(name: str) -> tuple[Any, ProbeResult, dict[str, Any]]:
    model, inputs = build(name), example_inputs(name)
    ids = inputs.pop("input_ids")
    arguments = {"extra_inputs": inputs, "entry": CASES[name].runs}
    if inputs or ids.dim() > 2:  # other inputs may have to fit the tokens
        arguments["input_ids"] = ids
    return model, probe_routes(model, **arguments), arguments


@pytest.mark.slow  # two minutes in all
@pytest.mark.parametrize("name", RUNNING)
def test_probe_over_the_zoo(name: str) -> None:
    model, result, arguments = probed(name)
    assert all(any(tensor.query_rows for tensor in block.tensors) for block in result.blocks)

    kinds = getattr(model.get_submodule(CASES[name].runs).config.get_text_config(), "layer_types", None)
    if kinds:
        assert set(kinds) <= GLOBAL | LIMITED | NOT_SOFTMAX
        expected = {n: kind in GLOBAL for n, kind in enumerate(kinds) if kind not in NOT_SOFTMAX}
        seen = {block.layer: block.global_attention for block in result.blocks}
        assert seen == MISLABELLED.get(name, expected), kinds

    sample = {block.module: block for block in (*result.blocks[:1], *result.blocks[-2:])}
    report = perturbation_check(model, replace(result, blocks=tuple(sample.values())), rows_per_range=2, **arguments)
    assert report.agrees, report
    assert report.num_rows
