"""Restore in memory: each method against a plain reference, what must not change, and everything that is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from routeguard.protect.modes import Interpolate, QKPro
from routeguard.restoration.in_memory import restore, restored
from routeguard.restoration.meaning import check_same_meaning, meaning_of, meaning_of_config
from routeguard.routes.collection import Route, Routes
from routeguard.routes.find import find_routes
from tests.tuned import assert_same, route_values, start_and_tuned, tune, values, with_rows_from
from tests.zoo.build import build, example_inputs

FAMILIES = [
    "lfm2", "qwen3_next", "phi3", "gpt2", "deepseek_v3", "zamba", "zamba2", "gemma3", "falcon", "falcon/groups",
    "llama", "codegen", "jetmoe", "kimi_linear",
]  # fmt: skip
WITH_A_PRODUCT = [
    "llama",
    "phi3",
    "gpt2",
    "falcon",
    "falcon/groups",
    "codegen",
    "qwen3_next",
    "lfm2",
    "gemma3",
    "zamba",
]

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")


def logits(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        return model(**example_inputs(name)).logits


# -- QK-Restore ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_restore_puts_back_the_routing_rows_and_nothing_else(name: str) -> None:
    start, model = start_and_tuned(name)
    routes = find_routes(model)
    assert not any(torch.equal(route_values(model, r), route_values(start, r)) for r in routes)  # all had moved
    expected = with_rows_from(model, start, routes)
    report = restore(model, start)
    assert_same(model, expected)
    assert set(report.tensors) == set(routes.parameters)
    assert 0 < report.changed_bytes <= routes.num_bytes
    assert all(value > 0 for layer in report.layers for value in layer.drift_before.values())


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [{"roles": ("query",)}, {"roles": "key"}, {"roles": ("value", "output")}, {"norms": True}],
    ids=lambda options: str(options),
)
def test_roles_and_norms_choose_what_is_restored(name: str, options: dict[str, Any]) -> None:
    start, model = start_and_tuned(name)
    routes = find_routes(model, **options)
    expected = with_rows_from(model, start, routes)
    report = restore(model, start, **options)
    assert_same(model, expected)
    assert (" only from " in str(report)) == ("roles" in options)


def test_layers_narrow_the_restore() -> None:
    start, model = start_and_tuned("lfm2")
    expected = with_rows_from(model, start, find_routes(model, layers=[5]))
    report = restore(model, start, layers=[5])
    assert_same(model, expected)
    assert [layer.layer for layer in report.layers] == [5]
    with pytest.raises(ValueError, match="layers \\[3\\] have no full attention"):
        restore(model, start, layers=[3])


def test_drift_before_is_the_relative_distance() -> None:
    start, model = start_and_tuned("qwen3_next")
    routes = find_routes(model)
    plain = {
        r.role: ((route_values(model, r) - route_values(start, r)).norm() / route_values(start, r).norm()).item()
        for r in routes
    }
    (layer,) = restore(model, start).layers
    assert dict(layer.drift_before) == pytest.approx(plain, rel=1e-5)
    report = restore(model, start)
    assert report.changed_bytes == 0 and set(report.layers[0].drift_before.values()) == {0.0}
    assert "nothing had moved" in str(report)


def test_changed_bytes_counts_what_changed() -> None:
    start, model = build("llama"), build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1
    report = restore(model, start)
    assert [layer.changed_bytes for layer in report.layers] == [0, 4, 0, 0]


def test_the_report_prints_and_serialises() -> None:
    start, model = start_and_tuned("qwen3_next")
    report = restore(model, start, method="interpolate")
    assert "interpolation (alpha 0.5)" in str(report) and "query 2." in str(report)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["schema_version"] == 1 and data["layers"][0]["tensors"] == list(report.tensors)


# -- the context manager ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["qk", "interpolate"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "phi3", "zamba2"])
def test_restored_gives_the_tuned_weights_back_bit_for_bit(name: str, method: str) -> None:
    start, model = start_and_tuned(name, dtype=torch.bfloat16)
    tuned = values(model)
    other = copy.deepcopy(model)
    restore(other, start, method=method)
    with restored(model, start, method=method):
        assert_same(model, values(other))
    assert_same(model, tuned)
    with pytest.raises(RuntimeError, match="evaluation failed"), restored(model, start, method=method):
        raise RuntimeError("evaluation failed")
    assert_same(model, tuned)


def test_restored_evaluates_the_repaired_model() -> None:
    start, model = start_and_tuned("lfm2")
    tuned = logits(model, "lfm2")
    with restored(model, start):
        inside = logits(model, "lfm2")
    assert torch.equal(logits(model, "lfm2"), tuned) and not torch.equal(inside, tuned)
    restore(model, start)
    assert torch.equal(logits(model, "lfm2"), inside)


# -- interpolation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["lfm2", "phi3", "gpt2", "falcon/groups", "deepseek_v3"])
def test_interpolation_equals_its_formula(name: str, dtype: torch.dtype) -> None:
    start, model = start_and_tuned(name, dtype=dtype)
    routes = find_routes(model)
    before = copy.deepcopy(model)
    restore(model, start, method=Interpolate(alpha=0.3))
    for route in routes:
        post, pre = route_values(before, route).float(), route_values(start, route).float()
        assert torch.equal(route_values(model, route), (0.7 * post + 0.3 * pre).to(dtype))


def test_interpolation_ends_at_the_tuned_and_at_the_start() -> None:
    start, model = start_and_tuned("phi3", dtype=torch.bfloat16)
    tuned = values(model)
    restore(model, start, method=Interpolate(alpha=0))
    assert_same(model, tuned)
    expected = with_rows_from(model, start, find_routes(model))
    restore(model, start, method=Interpolate(alpha=1))
    assert_same(model, expected)


def test_moves_lost_to_rounding_are_reported() -> None:
    start = build("llama").to(torch.bfloat16)
    model = copy.deepcopy(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 2**-7  # about one step of bfloat16
    with restored(model, start, method=Interpolate(alpha=0.1)) as report:
        assert "rounding to bfloat16 kept up to 100%" in str(report)
    with restored(model, start, method=Interpolate(alpha=0.9)) as report:
        assert "rounding" not in str(report)


# -- QK-Pro ----------------------------------------------------------------------------------------------------------


def heads(model: nn.Module, routes: Routes, layer: int, role: str, width: int) -> Tensor:
    """Query or key rows of a layer as `[heads, width, D]`, with the bias as a last column, in float64."""
    parts = [r for r in routes if r.layer == layer and r.role == role]
    weight = next(r for r in parts if r.kind == "weight")
    bias = [r for r in parts if r.kind == "bias"]
    matrix = route_values(model, weight).double()
    matrix = matrix.T if weight.dim else matrix
    if bias:
        matrix = torch.cat([matrix, route_values(model, bias[0]).double()[:, None]], dim=1)
    return matrix.reshape(-1, width, matrix.shape[1])


@pytest.mark.parametrize("name", WITH_A_PRODUCT)
def test_qk_pro_equals_the_ridge_form_head_by_head(name: str) -> None:
    start, model = start_and_tuned(name)
    routes = find_routes(model)
    tuned = copy.deepcopy(model)
    restore(model, start, method=QKPro(ridge=0.3))
    for layer in {r.layer for r in routes}:
        geometry = routes.geometry(layer)
        width = geometry.head_dim
        key_pre = heads(start, routes, layer, "key", width)
        assert torch.equal(heads(model, routes, layer, "key", width), key_pre)
        got = heads(model, routes, layer, "query", width)
        pre, post = heads(start, routes, layer, "query", width), heads(tuned, routes, layer, "query", width)
        for head in range(geometry.num_heads):
            key = key_pre[head * geometry.num_key_value_heads // geometry.num_heads]
            gram = key @ key.T  # [head_dim, head_dim]: in torch's layout the rows of a head are its dimensions
            ridge = 0.3 * gram.trace() / width * torch.eye(width, dtype=gram.dtype)
            share = torch.linalg.solve(gram + ridge, gram)
            expected = post[head] + share @ (pre[head] - post[head])
            torch.testing.assert_close(got[head], expected, rtol=1e-4, atol=1e-5)
    untouched = with_rows_from(model, tuned, routes)  # with the queries and keys put back, all is as tuned
    assert all(torch.equal(untouched[n], p) for n, p in tuned.named_parameters())


@pytest.mark.parametrize("name", WITH_A_PRODUCT)
def test_qk_pro_has_qk_restore_and_key_restore_as_limits(name: str) -> None:
    start, model = start_and_tuned(name)
    routes = find_routes(model)
    keys = with_rows_from(model, start, find_routes(model, roles="key"))
    both = with_rows_from(model, start, routes)
    for ridge, expected in ((0.0, both), (1e-9, both), (1e9, keys), (float("inf"), keys)):
        with restored(model, start, method=QKPro(ridge=ridge)):
            for route_name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.detach(), expected[route_name], rtol=1e-4, atol=1e-5)
    distance = max((both[n] - keys[n]).abs().max().item() for n in both)
    assert distance > 0.01  # the two limits are far apart, so the comparison above can fail


def test_qk_pro_says_so_where_queries_and_keys_are_normalised() -> None:
    start, model = start_and_tuned("lfm2")
    assert "queries and keys are normalised" in str(restore(model, start, method="qk_pro"))
    start, model = start_and_tuned("llama")
    assert "normalised" not in str(restore(model, start, method="qk_pro"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v3", "keys come from a latent \\(MLA\\)"),
        ("zamba2", "adapters add to the projections"),
        ("jetmoe", "queries come from routed experts"),
        ("zaya", "mixed by a convolution"),
        ("gemma3n_text", "no weight of its own"),
    ],
)
def test_qk_pro_is_refused_where_the_product_is_not_the_logit(name: str, reason: str) -> None:
    start, model = start_and_tuned(name)
    if name == "gemma3n_text" and all("k_proj" in dir(layer.self_attn) for layer in model.model.layers):
        pytest.skip("in this transformers layers that borrow their keys have unused weights of their own")
    tuned = values(model)
    with pytest.raises(ValueError, match=reason):
        restore(model, start, method="qk_pro")
    assert_same(model, tuned)


def test_qk_pro_needs_queries_and_keys() -> None:
    start, model = start_and_tuned("llama")
    with pytest.raises(ValueError, match="roles must be query and key; found query"):
        restore(model, start, method="qk_pro", roles=("query",))
    with pytest.raises(ValueError, match="'qk_prp' is not understood; closest 'qk_pro'"):
        restore(model, start, method="qk_prp")
    with pytest.raises(ValueError, match="method=None restores nothing"):
        restore(model, start, method=None)  # type: ignore[arg-type]


# -- dtypes, bad values, meaning -------------------------------------------------------------------------------------


def test_another_dtype_is_converted_and_noted() -> None:
    start, _ = start_and_tuned("phi3")
    _, model = start_and_tuned("phi3", dtype=torch.bfloat16)
    routes = find_routes(model)
    report = restore(model, start)
    assert all(torch.equal(route_values(model, r), route_values(start, r).bfloat16()) for r in routes)
    assert "4 tensors converted from the start's float32 to bfloat16 (rounded)" in report.notes
    report = restore(model.float(), start.bfloat16())
    assert "4 tensors converted from the start's bfloat16 to float32 (exact)" in report.notes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    start, model = start_and_tuned("lfm2")
    tuned = values(model)
    bad = copy.deepcopy(start)
    with torch.no_grad():
        bad.model.layers[5].self_attn.k_proj.weight[0, 0] = value
    with pytest.raises(ValueError, match=r"NaN or infinite routing weights: .*5.*k_proj.weight in the reference"):
        restore(model, bad)
    assert_same(model, tuned)
    with pytest.raises(ValueError, match=r"NaN or infinite routing weights: .*layers.5.*k_proj.weight in the model"):
        restore(bad, start)
    restore(bad, bad.state_dict() | start.state_dict(), layers=[2])  # the bad layer is not asked for


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "window": ("phi3", {"sliding_window": 4096}),
    "softcap": ("gemma2", {"attn_logit_softcapping": 30.0}),
    "scalar": ("gemma2", {"query_pre_attn_scalar": 99}),
    "partial rotary": ("phi", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_models_that_read_the_weights_differently_are_refused(change: str) -> None:
    name, fields = CHANGES[change]
    start, model = start_and_tuned(name)
    for field, value in fields.items():
        setattr(start.config, field, value)
    tuned = values(model)
    with pytest.raises(ValueError, match="differ in what gives queries and keys their meaning") as caught:
        restore(model, start)
    assert " in the model, " in str(caught.value)
    assert_same(model, tuned)
    if change != "window":  # a windowed phi3 has no full attention to compare
        expected = with_rows_from(model, start, find_routes(model))
        report = restore(model, start, insist=True)
        assert_same(model, expected)
        assert any(note.startswith("insisted on although they differ") for note in report.notes)


def test_rotary_settings_of_each_kind_of_layer_are_compared() -> None:
    start, model = start_and_tuned("gemma3")
    nested = getattr(start.config.text_config, "rope_parameters", None)
    if nested is None:
        pytest.skip("this transformers has one rotary setting for all layers")
    nested["full_attention"] = {**nested["full_attention"], "rope_type": "linear", "factor": 8.0}
    with pytest.raises(ValueError, match=r"rope \(full_attention\): .*\"factor\": 8.0"):
        restore(model, start)


def test_meaning_is_the_same_for_old_and_new_spellings_of_a_config() -> None:
    old = {"model_type": "x", "rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {"model_type": "x", "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
    assert meaning_of_config(old) == meaning_of_config(new)
    assert meaning_of_config({**old, "rope_theta": 5e5}) != meaning_of_config(new)


def test_a_state_dict_has_no_meaning_to_compare() -> None:
    start, model = start_and_tuned("llama")
    assert any("reference carries no config" in note for note in restore(model, start.state_dict()).notes)
    assert meaning_of(nn.Linear(2, 2)) == {}
    assert check_same_meaning({"a": 1, "b": 2}, {"a": 1}) == ("known of one side only, not compared: b",)


def test_meaning_survives_saving(tmp_path: Path) -> None:
    for name in ("lfm2", "gemma3", "qwen3_next", "gpt2"):
        start, model = start_and_tuned(name)
        start.save_pretrained(tmp_path / name.replace("/", "_"))
        report = restore(model, tmp_path / name.replace("/", "_"))
        assert not [note for note in report.notes if "compared" in note or "differ" in note]


def test_another_model_leaves_the_model_unchanged() -> None:
    _, model = start_and_tuned("lfm2")
    tuned = values(model)
    with pytest.raises(ValueError, match="is not from this model"):
        restore(model, build("llama"))
    assert_same(model, tuned)


def test_split_parameters_are_refused() -> None:
    start, model = start_and_tuned("llama")
    next(iter(model.model.layers[0].self_attn.parameters())).ds_id = 0
    with pytest.raises(ValueError, match=r"split over processes.*routeguard restore BASE TUNED --out FIXED"):
        restore(model, start)


def test_a_model_found_by_the_probe_can_be_restored_with_its_routes() -> None:
    start, model = start_and_tuned("lfm2")
    routes = find_routes(model, layers=[2])
    expected = with_rows_from(model, start, routes)
    restore(model, start, routes=routes)
    assert_same(model, expected)


def test_wrapped_models_are_restored_in_place() -> None:
    start, model = start_and_tuned("llama")
    expected = with_rows_from(model, start, find_routes(model))

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    restore(Wrapper(model), start)
    assert_same(model, expected)


def test_tuning_moves_everything() -> None:
    """Control for this file: the noise reaches every parameter, so equality after a restore means something."""
    start, model = start_and_tuned("zamba2")
    assert all(not torch.equal(a, b) for a, b in zip(start.parameters(), model.parameters(), strict=True))
    tune(start, size=0.0)
    assert isinstance(find_routes(start)[0], Route)


def test_a_start_beyond_the_range_of_the_model_is_refused() -> None:
    start, model = build("llama"), build("llama", seed=1).half()
    with torch.no_grad():
        start.model.layers[1].self_attn.q_proj.weight[0, 0] = 1e5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight has entries beyond the range of float16"
    ):
        restore(model, start)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    restore(model.float(), start)
    assert model.model.layers[1].self_attn.q_proj.weight[0, 0] == 1e5
