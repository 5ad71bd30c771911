"""Head counts, rotary width and pairing of every decoder family, by changes of Q and K that cancel in the logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from routeguard.routes.collection import AttentionLayer, Routes
from routeguard.routes.find import find_routes
from tests.gauge import attention_output, gauged, sharpen
from tests.test_routes_table import NO_FULL_LAYER, QUICK
from tests.zoo.build import CASES, build, example_inputs, runner

SWEEP = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, case in CASES.items()
    if case.forward and name not in NO_FULL_LAYER
]
# LayerNorm takes the mean out as well, which a turn of the channels does not keep.
CENTRED_NORM = {"persimmon", "fuyu", "phi/qk_norm", "stablelm/qk_norm", "cohere/qk_norm", "chameleon"}
NORMALISED = "queries and keys are normalised"
SAME, DIFFERENT = 3e-4, 2e-3  # relative change of the attention output


def routes_of(model: Any, **options: Any) -> Routes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return find_routes(model, shared=True, **options)


def distinct(routes: Routes, obstacle: str | None) -> list[AttentionLayer]:
    """One layer of each geometry, among those whose keys are their own and no values."""
    chosen: dict[tuple[Any, ...], AttentionLayer] = {}
    for layer in routes.attention:
        keys = [r for r in routes if r.role == "key" and r.parameter.startswith(f"{layer.module}.")]
        if layer.product_obstacle != obstacle or not keys or any(route.shared for route in keys):
            continue
        signature = (layer.rotary_dim, layer.rotary_pairing, layer.head_dim, layer.num_heads, layer.num_key_value_heads)
        chosen.setdefault(signature, layer)
    return list(chosen.values())


@pytest.mark.parametrize("name", SWEEP)
def test_gauge_freedom_is_what_the_geometry_says(name: str) -> None:
    model, inputs = build(name), example_inputs(name)
    routes = routes_of(model)
    run = runner(name, model)
    parameters = dict(model.named_parameters())
    plain, normalised = distinct(routes, None), distinct(routes, NORMALISED)
    for route in routes_of(model, norms=True):
        if route.kind == "norm" and "norm" in route.parameter:
            parameters[route.parameter].data.fill_(0.0 if route.parameter.endswith("bias") else 1.4)
    if not (plain or normalised):
        pytest.skip(f"no layer whose logits are a plain product: {routes.attention[0].product_obstacle}")

    for layer in (*plain, *normalised):
        prefix = f"{CASES[name].runs}." if CASES[name].runs else ""
        module = layer.module.removeprefix(prefix)
        inside = [route for route in routes if route.parameter.startswith(f"{layer.module}.")]
        queries = [route for route in inside if route.role == "query"]

        def output(module: str = module) -> torch.Tensor:
            return attention_output(run, inputs, module)

        # The length of queries matters, unless a norm takes it out. Make attention neither flat nor saturated.
        for factor in (125.0,) if layer in normalised else (5.0, 5.0, 5.0, 1 / 625, 1 / 5, 1 / 5):
            sharpen(parameters, inside, factor)
            base = output()
            sharpen(parameters, queries, 3.0)
            longer = relative_change(output(), base)
            sharpen(parameters, queries, 1 / 3.0)
            if longer > 2 * DIFFERENT:
                break
        assert longer < SAME if layer in normalised else longer > DIFFERENT, (longer, layer)

        def change(rotary_dim: int, pairing: str, layer: AttentionLayer = layer) -> float:
            keep = layer in normalised
            with gauged(parameters, routes, layer, rotary_dim=rotary_dim, pairing=pairing, norm_preserving=keep):
                return relative_change(output(), base)  # noqa: B023

        if layer in normalised and name in CENTRED_NORM:
            continue
        assert change(layer.rotary_dim, layer.rotary_pairing) < SAME, layer
        if layer.rotary_dim:  # an arbitrary matrix must not be allowed where channels rotate
            assert change(0, "half") > DIFFERENT, layer
        if layer.rotary_dim > 2:
            other = "half" if layer.rotary_pairing == "interleaved" else "interleaved"
            assert change(layer.rotary_dim, other) > DIFFERENT, layer


def relative_change(output: torch.Tensor, base: torch.Tensor) -> float:
    return float((output - base).norm() / base.norm())


def test_two_modules_of_one_layer_have_their_own_geometry() -> None:
    routes = routes_of(build("longcat_flash", device="meta"))
    first = [route for route in routes if route.layer == 0]
    modules = {routes.geometry_of(route).module for route in first}
    assert modules == {"model.layers.0.self_attn.0", "model.layers.0.self_attn.1"}
    assert all(route.parameter.startswith(routes.geometry_of(route).module) for route in routes)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "phi3"])
def test_the_module_under_an_adapter_is_the_attention_module(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = build(name)
    plain = find_routes(model).attention
    targets = ["qkv_proj"] if name == "phi3" else ["q_proj", "k_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    routes = find_routes(wrapped)
    assert [layer.module for layer in routes.attention] == [f"base_model.model.{layer.module}" for layer in plain]
    for route in routes:
        assert route.parameter.startswith(f"{routes.geometry_of(route).module}.")
