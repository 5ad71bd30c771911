"""The table of architectures against the autograd probe, over every decoder family of transformers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from routeguard.routes.collection import Routes
from routeguard.routes.find import find_routes
from routeguard.routes.table import architectures
from tests.probed_routes import expected_routes, found_routes
from tests.zoo.build import CASES, build
from tests.zoo.hybrids import HYBRID_CASES

EVERYTHING: dict[str, Any] = {"norms": True, "shared": True}
NO_FULL_LAYER = {
    "minimax/window", "ministral/window", "ministral3/window", "mistral/window", "mixtral/window", "phi3/window",
    "phimoe/window", "starcoder2/window", "qwen3_moe/window", "recurrent_gemma", "mistral3/window", "voxtral_realtime",
    "doge/window",
} & set(CASES)  # fmt: skip
QUICK = [case.name for case in HYBRID_CASES] + [
    "gemma3_text", "gpt_oss", "llama4_text", "gpt2", "gpt_neox", "falcon/groups", "codegen", "jetmoe", "doge",
    "deepseek_v3", "deepseek_v4", "axk2", "gemma4_text/k_eq_v", "longcat_flash", "hrm_text", "mllama", "qwen3_5",
]  # fmt: skip
SWEEP = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


def routes_of(name: str, **options: Any) -> Routes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pure softmax models say so
        return find_routes(build(name, device="meta"), **options)


@pytest.mark.parametrize("name", SWEEP)
def test_rows_are_those_that_the_probe_finds(name: str) -> None:
    expected = expected_routes(name)
    if name in NO_FULL_LAYER:
        assert not expected
        with pytest.raises(ValueError, match="no full-attention layer"):
            routes_of(name)
        return
    assert expected
    assert found_routes(name, routes_of(name, **EVERYTHING)) == expected
    # Without options: the pure rows of weights and biases, and nothing else.
    pure = {row for row in expected if row.kind != "norm" and not row.shared}
    assert found_routes(name, routes_of(name)) == pure


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "gpt_neox"])
def test_comparison_notices_one_wrong_row(name: str) -> None:
    """The control: an answer that differs by one row, one layer or one role is not accepted."""
    routes = routes_of(name, **EVERYTHING)
    first = next(route for route in routes if route.rows and not route.shared)
    start, stop = first.rows[0]
    broken = [
        {"rows": ((start, stop - 1), *first.rows[1:])},
        {"layer": first.layer + 1},
        {"role": "key" if first.role == "query" else "query"},
        {"shared": True},
    ]
    for change in broken:
        data = routes.to_dict()
        data["routes"][routes.routes.index(first)].update(change)
        assert found_routes(name, Routes.from_dict(data)) != expected_routes(name), change


@pytest.mark.parametrize("name", [name for name in CASES if name not in NO_FULL_LAYER])
def test_meta_device_model_reads_the_same_through_json(name: str) -> None:
    routes = routes_of(name, **EVERYTHING)
    again = Routes.from_json(routes.to_json())
    assert again == routes
    assert hash(again) == hash(routes)
    assert str(again) == str(routes)


@pytest.mark.parametrize("name", QUICK)
def test_cpu_model_reads_as_on_the_meta_device(name: str) -> None:
    if name in NO_FULL_LAYER:
        pytest.skip("no full-attention layer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert find_routes(build(name), **EVERYTHING) == routes_of(name, **EVERYTHING)


def test_every_zoo_model_type_has_a_row() -> None:
    known = {model_type for row in architectures() for model_type in row.model_types}
    missing = {
        routes_of(name).model_type for name in CASES if name not in NO_FULL_LAYER and CASES[name].forward
    } - known
    assert not missing


def test_layers_narrow_the_answer() -> None:
    routes = routes_of("qwen3_next", norms=True)
    layer = routes.layers[0]
    narrowed = routes_of("qwen3_next", norms=True, layers=[layer])
    assert narrowed.layers == (layer,)
    assert narrowed.routes == tuple(route for route in routes if route.layer == layer)


@pytest.mark.parametrize(("roles", "expected"), [(("value",), {"value"}), (("query", "output"), {"query", "output"})])
def test_other_roles_when_asked_for(roles: tuple[str, ...], expected: set[str]) -> None:
    assert {route.role for route in routes_of("lfm2", roles=roles)} == expected
    assert {route.role for route in routes_of("lfm2")} == {"query", "key"}


def test_value_rows_are_those_of_the_probe() -> None:
    """For ablations; read from fused, gated and latent layouts alike."""
    from tests.probed_routes import probe_case

    for name in ("gpt_neox", "falcon/groups", "codegen", "deepseek_v3", "lfm2", "gpt2"):
        _, result = probe_case(name)
        expected = {
            (tensor.parameter, row)
            for block in result.blocks
            if block.global_attention
            for tensor in block.tensors
            for start, stop in tensor.value_rows
            for row in range(start, stop)
            if not tensor.parameter.endswith("layernorm.weight")
        }
        routes = routes_of(name, roles=("value",), shared=True)
        shared_latent = routes_of(name, roles=("key",), shared=True)
        rows = [*routes, *(route for route in shared_latent if route.shared)]
        found = {
            (route.parameter, row)
            for route in rows
            for start, stop in (route.rows or ((0, route.shape[route.dim]),))
            for row in range(start, stop)
        }
        assert found == expected, name


def test_documentation_page_is_current() -> None:
    from pathlib import Path

    from routeguard.routes.document import document

    page = Path(__file__).parent.parent / "docs" / "architectures.md"
    assert page.read_text() == document(), "run: python -m routeguard.routes.document > docs/architectures.md"
