"""The autograd probe on known layouts: rows, reach, what must not appear, wrappers and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from routeguard.routes._rows import row_layout
from routeguard.routes.probe import probe_routes
from tests.perturbation import perturbation_check
from tests.probed_rows import bias, key, last_global, per_head, query, rows_of, value
from tests.zoo.build import build, example_inputs

SEPARATE = {"q_proj.weight": query((0, 64)), "k_proj.weight": key((0, 32)), "v_proj.weight": value((0, 32))}
NORMS = {"q_norm.weight": query((0, 16)), "k_norm.weight": key((0, 16))}
BY_HEAD = (0, per_head(0, 16, 48), per_head(16, 32, 48), per_head(32, 48, 48), ())
LATENT = {  # rank 28, rope 4, nope 12, value 10
    "kv_a_proj_with_mqa.weight": (0, (), ((0, 32),), ((0, 28),), ()),
    "kv_a_layernorm.weight": (0, (), ((0, 28),), ((0, 28),), ()),
    "kv_b_proj.weight": (0, (), per_head(0, 12, 22), per_head(12, 22, 22), ()),
}

# What the last globally attending block of each layout must be, written from the modelling code.
LAYOUTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": SEPARATE,
    "olmo2": SEPARATE | {"q_norm.weight": query((0, 64)), "k_norm.weight": key((0, 32))},
    "gpt2": {
        "c_attn.weight": (1, ((0, 64),), ((64, 128),), ((128, 192),), ()),
        "c_attn.bias": (0, ((0, 64),), ((64, 128),), ((128, 192),), ()),
    },
    "phi3": {"qkv_proj.weight": (0, ((0, 64),), ((64, 96),), ((96, 128),), ())},
    "mpt": {"Wqkv.weight": (0, ((0, 64),), ((64, 128),), ((128, 192),), ())},
    "gpt_neox": {"query_key_value.weight": BY_HEAD, "query_key_value.bias": BY_HEAD},
    "bloom": {"query_key_value.weight": BY_HEAD, "query_key_value.bias": BY_HEAD},
    "codegen": {"qkv_proj.weight": (0, per_head(0, 16, 48), per_head(32, 48, 48), per_head(16, 32, 48), ())},
    "falcon": {"query_key_value.weight": (0, ((0, 64),), ((64, 80),), ((80, 96),), ())},
    "falcon/groups": {
        "query_key_value.weight": (0, per_head(0, 32, 64, 2), per_head(32, 48, 64, 2), per_head(48, 64, 64, 2), ())
    },
    "gpt_bigcode": {
        "c_attn.weight": (0, ((0, 64),), ((64, 80),), ((80, 96),), ()),
        "c_attn.bias": (0, ((0, 64),), ((64, 80),), ((80, 96),), ()),
    },
    "deepseek_v2": {
        "q_a_proj.weight": query((0, 20)),
        "q_a_layernorm.weight": query((0, 20)),
        "q_b_proj.weight": query((0, 64)),
        **LATENT,
    },
    "deepseek_v2/no_q_lora": {"q_proj.weight": query((0, 64)), **LATENT},
    "kimi_linear": {"q_proj.weight": query((0, 64)), **LATENT},
    "qwen3_next": {**SEPARATE, **NORMS, "q_proj.weight": query(*per_head(0, 16, 32))},
    "gpt_oss": {
        **SEPARATE,
        "q_proj.bias": query((0, 64)),
        "k_proj.bias": key((0, 32)),
        "v_proj.bias": value((0, 32)),
        "sinks": bias((0, 4)),
    },
    "doge": {
        **SEPARATE,
        **NORMS,
        "A": bias((0, 2)),
        "dt_proj.weight": bias((0, 2)),
        "v_proj.weight": (0, (), (), ((0, 32),), ((0, 32),)),
    },
    "jetmoe": {
        "experts.input_linear.weight": query((0, 32), dim=1),
        "kv_proj.weight": (0, (), ((0, 32),), ((32, 64),), ()),
    },
    "gemma3n_text": {"q_proj.weight": query((0, 64)), "q_norm.weight": query((0, 16))},  # keys of an earlier layer
    "gemma4_text/k_eq_v": {
        "q_proj.weight": query((0, 96)),
        "q_norm.weight": query((0, 24)),
        "k_norm.weight": key((0, 24)),
        "k_proj.weight": (0, (), ((0, 24),), ((0, 24),), ()),
    },
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_rows_of_known_layouts(case: str) -> None:
    assert rows_of(last_global(probe_routes(build(case)))) == LAYOUTS[case]


def test_mixed_queries_and_keys() -> None:
    found = rows_of(last_global(probe_routes(build("zaya"))))
    assert found["qkv_proj.q_proj.weight"] == (0, ((0, 64),), ((0, 64),), (), ())
    assert found["qkv_proj.k_proj.weight"] == (0, ((0, 32),), ((0, 32),), (), ())
    assert found["qkv_proj.conv_qk_grouped.weight"] == (0, ((0, 64),), ((64, 96),), (), ())
    assert found["qk_norm.temp"] == key((0, 2))


def test_shared_keys_are_listed_where_they_are_owned() -> None:
    model = build("gemma3n_text")
    if hasattr(model.model.layers[-1].self_attn, "k_proj"):
        pytest.skip("without a cache, sharing layers of this transformers use keys of their own")
    blocks = probe_routes(model).blocks
    owners = [any(tensor.key_rows for tensor in block.tensors) for block in blocks]
    assert owners == [True, True, True, True, False, False]
    assert all(any(tensor.query_rows for tensor in block.tensors) for block in blocks)


def test_tied_blocks_appear_once_a_layer_under_the_parameter_that_is_named() -> None:
    blocks = probe_routes(build("zamba")).blocks
    assert [block.layer for block in blocks] == [1, 3, 5]
    assert {tensor.parameter for block in blocks for tensor in block.tensors} == {
        f"model.layers.1.shared_transf.self_attn.{name}_proj.weight" for name in "qkv"
    }


def test_built_in_adapters_belong_to_their_layer() -> None:
    blocks = probe_routes(build("zamba2")).blocks
    for index, block in enumerate(blocks):
        adapters = {name for name in rows_of(block) if "_q_adapter_list" in name}
        assert {name.rpartition("linear_q_adapter_list.")[2] for name in adapters} == {
            f"{index}.0.weight",
            f"{index}.1.weight",
        }


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("qwen3_next", {3: True}),
        ("bailing_hybrid", {2: True, 5: True}),  # linear layers are self_attn with q_proj and k_proj too
        ("nemotron_h", {1: True, 5: True}),
        ("olmo_hybrid", {3: True}),
        ("recurrent_gemma", {2: False}),
        ("mistral/window", {0: False, 1: False, 2: False, 3: False}),
        ("gpt_neo", {0: True, 1: False, 2: True, 3: False}),
        ("llama4_text", {0: False, 1: False, 2: False, 3: True, 4: False, 5: False}),
    ],
)
def test_which_layers_attend_and_how_far(case: str, expected: dict[int, bool]) -> None:
    assert {block.layer: block.global_attention for block in probe_routes(build(case)).blocks} == expected


def test_reach_is_the_window_less_one() -> None:
    model = build("mistral/window")
    assert {block.reach_tokens for block in probe_routes(model).blocks} == {model.config.sliding_window - 1}


def test_a_window_longer_than_the_pass_is_shortened_and_said_so() -> None:
    model = build("mistral/window")
    model.config.sliding_window = 4096
    result = probe_routes(model)
    assert not any(block.global_attention for block in result.blocks)
    assert any("sliding_window=4096" in note for note in result.notes)
    assert model.config.sliding_window == 4096


def test_a_short_window_gets_a_longer_pass() -> None:
    model = build("mistral/window")
    model.config.sliding_window = 40
    result = probe_routes(model)
    assert {block.reach_tokens for block in result.blocks} == {39} and result.notes == ()


def test_attention_over_layers_is_left_out_with_a_note() -> None:
    result = probe_routes(build("inkling2_text"))
    assert {block.module for block in result.blocks} == {f"model.layers.{layer}.self_attn" for layer in range(6)}
    assert any("not over tokens" in note and "attention_input" in note for note in result.notes)


def test_discrete_selection_is_said_not_guessed() -> None:
    result = probe_routes(build("deepseek_v32"))
    assert any("top-k" in note for note in result.notes)
    for block in result.blocks:
        assert any("indexer" in name for name in block.selectors)
        assert not any("indexer" in tensor.parameter for tensor in block.tensors)


def test_image_towers_and_cross_attention_are_left_out() -> None:
    inputs = example_inputs("blip")
    ids = inputs.pop("input_ids")
    result = probe_routes(build("blip"), input_ids=ids, extra_inputs=inputs)
    assert [block.module for block in result.blocks] == [
        f"text_decoder.bert.encoder.layer.{layer}.attention.self" for layer in range(4)
    ]
    (note,) = [note for note in result.notes if "do not depend on the tokens" in note]
    assert "crossattention" in note and "vision_model" in note


def test_wrapper_without_a_forward_pass() -> None:
    model = build("qwen2_5_omni")
    blocks = probe_routes(model, entry="thinker").blocks
    assert [block.module for block in blocks] == [
        f"thinker.model.language_model.layers.{layer}.self_attn" for layer in range(6)
    ]
    assert {tensor.parameter for block in blocks for tensor in block.tensors} <= dict(model.named_parameters()).keys()


def test_row_dimension() -> None:
    conv1d = type("Conv1D", (nn.Module,), {})()
    whole = torch.ones(4, 6, dtype=torch.bool)
    assert row_layout({"query": whole}, conv1d) == (1, {"query": ((0, 6),)})
    assert row_layout({"query": whole}, nn.Linear(6, 4)) == (0, {"query": ((0, 4),)})
    columns = whole & (torch.arange(6) % 3 != 1)
    assert row_layout({"key": columns}, None) == (1, {"key": ((0, 1), (2, 4), (5, 6))})
    experts = torch.zeros(5, 4, 6, dtype=torch.bool)
    experts[1:3, 2:] = True  # only two of the experts were picked
    assert row_layout({"key": experts}, None) == (1, {"key": ((2, 4),)})
    assert row_layout({"key": experts.transpose(1, 2)}, None) == (2, {"key": ((2, 4),)})
    kernel = torch.zeros(4, 1, 3, dtype=torch.bool)
    kernel[:2] = True
    assert row_layout({"query": kernel}, nn.Conv1d(4, 4, 3, groups=4)) == (0, {"query": ((0, 2),)})


def adapted(case: str, **config: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(build(case), peft.LoraConfig(r=2, **config))


def test_fresh_adapters_are_listed_although_their_product_is_zero() -> None:
    model = adapted("qwen3_next", target_modules=["q_proj", "k_proj", "v_proj"])
    result = probe_routes(model)
    (block,) = result.blocks
    assert block.module == "base_model.model.model.layers.3.self_attn"
    found = rows_of(block)
    gated = query(*per_head(0, 16, 32))
    assert found["q_proj.base_layer.weight"] == found["q_proj.lora_B.default.weight"] == gated
    assert found["q_proj.lora_A.default.weight"] == query((0, 2))
    assert found["k_proj.lora_B.default.weight"] == key((0, 32))
    assert perturbation_check(model, result).agrees


def test_dora_on_a_fused_conv1d() -> None:
    model = adapted("gpt2", target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True)
    result = probe_routes(model)
    found = rows_of(result.blocks[0])
    thirds = ((0, 64),), ((64, 128),), ((128, 192),), ()
    assert found["c_attn.base_layer.weight"] == (1, *thirds)
    assert found["c_attn.lora_B.default.weight"] == found["c_attn.lora_magnitude_vector.default.weight"] == (0, *thirds)
    assert found["c_attn.lora_A.default.weight"] == (0, ((0, 2),), ((0, 2),), ((0, 2),), ())
    assert perturbation_check(model, result).agrees


def test_zero_weights_hide_nothing() -> None:
    model = build("qwen3_next")
    attention = model.model.layers[3].self_attn
    expected = rows_of(probe_routes(model).blocks[0])
    for parameter in attention.parameters():
        parameter.data.zero_()
    assert rows_of(probe_routes(model).blocks[0]) == expected
    assert not any(parameter.any() for parameter in attention.parameters())


def test_half_precision_compiled_and_without_gradients() -> None:
    model = build("phi3")
    expected = [rows_of(block) for block in probe_routes(model).blocks]
    with torch.no_grad():
        assert [rows_of(block) for block in probe_routes(model).blocks] == expected
    with torch.inference_mode():
        assert [rows_of(block) for block in probe_routes(model).blocks] == expected
    compiled = probe_routes(torch.compile(model))
    assert [block.module for block in compiled.blocks] == [f"_orig_mod.model.layers.{n}.self_attn" for n in range(4)]
    assert [rows_of(block) for block in compiled.blocks] == expected
    assert [rows_of(block) for block in probe_routes(model.to(torch.bfloat16)).blocks] == expected


def test_gradient_hooks_of_the_user_neither_run_nor_distort() -> None:
    model = build("llama")
    seen: list[int] = []
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.register_hook(lambda gradient: seen.append(1) or torch.zeros_like(gradient))
    assert rows_of(probe_routes(model).blocks[0]) == SEPARATE
    assert not seen


def test_readable() -> None:
    text = str(probe_routes(build("gpt2")))
    assert "transformer.h.0.attn (layer 0, global)" in text
    assert "transformer.h.0.attn.c_attn.weight dim 1: query ((0, 64),), key ((64, 128),)" in text
