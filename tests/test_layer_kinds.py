"""Layer kinds of configs without a list of layer types, against what transformers' own config classes derive."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from routeguard.routes.config import text_config
from routeguard.routes.layer_kinds import KIND_OF_LABEL, layer_kinds
from tests.zoo.build import config_class_of

# Vision and audio towers, backbones, encoders and encoder-decoders: they have layer types, but no routes to guard.
NOT_A_DECODER = """
    bit d_fine deimv2 lfm3_vl_vision modernbert muse_glimmer_vision muse_spark_vision neomme pp_doclayout_v2
    pp_doclayout_v3 qwen3_omni_moe_talker_code_predictor regnet resnet rt_detr rt_detr_resnet rt_detr_v2
    t5_gemma_module t5gemma2_decoder t5gemma2_text ultrabert
""".split()  # noqa: SIM905

# Fields that say what each layer does, or that the class derives from such a field.
DERIVED = """
    layer_types layers_block_type mlp_layer_types no_rope_layers moe_layers per_layer_config
    num_attention_heads_per_layer layer_rope_theta mtp_layer_types mtp_mlp_layer_types indexer_types
    _sliding_window_pattern activation_sparsity_pattern mlp_only_layers n_recurrent_layers kv_source_layers
    kv_sharing_modes hybrid_layer_ids attention_layers attention_types full_attn_idxs block_types
""".split()  # noqa: SIM905

# What older and hand-written configs say instead. Each is tried on the classes whose source reads all of its keys.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_hidden_layers": 13},
    {"sliding_window": None},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5},
    {"sliding_window": 64, "max_window_layers": 5},
    {"sliding_window_pattern": 3},
    {"full_attention_interval": 3},
    {"attn_layer_period": 3, "attn_layer_offset": 2},
    {"global_attn_every_n_layers": 5},
    {"layer_group_size": 3},
    {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 64},
    {"no_rope_layers": [1, 0, 0] * 4, "use_sliding_window": True, "sliding_window": 64},
    {"no_rope_layers": [1, 0, 0] * 4},
    {"attention_chunk_size": None},
    {"attn_layer_indices": [1, 4]},
    {"full_attn_idxs": [1, 4]},
    {"local_layer_ids": [1, 4]},
    {"linear_attn_config": {"full_attn_layers": [4, 8, 12], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]}},
    {"compress_ratios": [0, 4, 128] * 4},
    {"hybrid_override_pattern": "M-M*E*-M-M*E"},
    {"layers_block_type": ["mamba", "attention", "mamba"] * 4},
    {"sparse_attention_config": {"sparse_attention_freq": [0, 1] * 6}},
    {"block_types": ["recurrent", "attention"]},
    {"use_dsa": False},
    {"use_dsa": True},
    {"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2},
    {"num_nextn_predict_layers": 2, "layer_types": ["full_attention", "sliding_attention"] * 7},
)


@cache
def source_of(model_type: str) -> str:
    return inspect.getsource(inspect.getmodule(CONFIG_MAPPING[model_type]))


def derives_layer_types(model_type: str) -> bool:
    if model_type in NOT_A_DECODER or not (
        "layer_types" in source_of(model_type) or "block_type" in source_of(model_type)
    ):
        return False
    labels = vars(CONFIG_MAPPING[model_type]()).get("layer_types")
    return isinstance(labels, list) and bool(labels)


DERIVING = [model_type for model_type in CONFIG_MAPPING if derives_layer_types(model_type)]


def raw_config(model_type: str, variant: dict[str, Any]) -> dict[str, Any]:
    """A config as it may stand on the Hub: the class's defaults without what it derives, and the variant's keys."""
    fields = CONFIG_MAPPING[model_type]().to_dict()
    return {key: value for key, value in fields.items() if key not in DERIVED} | variant


def variants_of(model_type: str) -> list[dict[str, Any]]:
    general = {"num_hidden_layers", "sliding_window", "layer_types"}
    return [v for v in VARIANTS if all(key in general or key in source_of(model_type) for key in v)]


@pytest.mark.parametrize("model_type", DERIVING)
def test_kinds_without_a_list_are_those_of_the_config_class(model_type: str) -> None:
    compared = 0
    for variant in variants_of(model_type):
        for settings in (variant, {"num_hidden_layers": 12} | variant):
            raw = raw_config(model_type, settings)
            try:
                labels = CONFIG_MAPPING[model_type](**raw).layer_types
            except Exception:  # this class does not accept the variant
                continue
            if any(label not in KIND_OF_LABEL for label in labels):
                continue
            if raw.get("attention_chunk_size", 0) is None and "chunked_attention" in labels:
                continue  # what releases before 5 derive here cannot run
            compared += 1
            expected = tuple(KIND_OF_LABEL[label] for label in labels)
            if model_type == "minimax" and raw["sliding_window"]:
                # The labels say full, and the modelling code applies the window all the same.
                expected = tuple("sliding" if kind == "full" else kind for kind in expected)
            assert layer_kinds(raw) == expected, settings
    assert compared


@pytest.mark.parametrize("model_type", DERIVING)
def test_kinds_of_a_saved_config_are_those_of_the_config_class(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    saved = config.to_diff_dict()
    assert layer_kinds(saved) == tuple(KIND_OF_LABEL[label] for label in config.layer_types)


@pytest.mark.parametrize("key", ["sliding_window", "max_window_layers", "use_sliding_window"])
@pytest.mark.parametrize("model_type", DERIVING)
def test_absent_keys_take_the_default_of_the_class(model_type: str, key: str) -> None:
    raw = raw_config(model_type, {"num_hidden_layers": 12, "use_sliding_window": True, "sliding_window": 64})
    raw.pop(key, None)
    try:
        labels = CONFIG_MAPPING[model_type](**raw).layer_types
    except Exception:
        pytest.skip("the class does not accept these values")
    expected = tuple(KIND_OF_LABEL[label] for label in labels)
    if model_type == "minimax" and raw.get("sliding_window"):
        expected = tuple("sliding" if kind == "full" else kind for kind in expected)
    assert layer_kinds(raw) == expected


WINDOWED = ["mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral3", "qwen3_moe", "doge", "minimax"]


@pytest.mark.parametrize("model_type", WINDOWED)
def test_one_window_narrows_every_softmax_layer(model_type: str) -> None:
    config_class_of(model_type)
    raw = raw_config(model_type, {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64})
    assert "full" not in layer_kinds(raw)
    assert "sliding" in layer_kinds(raw)
    assert "full" in layer_kinds({**raw, "sliding_window": None})
    # A window as long as the longest context narrows nothing (phi-3.5: 262144 tokens in a context of 131072).
    assert "full" in layer_kinds({**raw, "sliding_window": 64, "max_position_embeddings": 64})


def test_qwen3_moe_needs_its_flag_and_mistral_assumes_a_window() -> None:
    qwen = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "sliding_window": 64}
    assert layer_kinds(qwen) == ("full", "full")
    assert layer_kinds({"model_type": "mistral", "num_hidden_layers": 2}) == ("sliding", "sliding")
    assert layer_kinds({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}) == ("full", "full")


def test_minimax_ignores_attn_type_list_as_transformers_does() -> None:
    raw = {"model_type": "minimax", "num_hidden_layers": 4, "attn_type_list": [0, 0, 1, 1], "sliding_window": None}
    labels = CONFIG_MAPPING["minimax"](**{k: v for k, v in raw.items() if k != "model_type"}).layer_types
    assert layer_kinds(raw) == tuple(KIND_OF_LABEL[label] for label in labels) == ("full", "other", "full", "other")


REMOTE = [
    ({"mixer_types": ["lightning-attn", "attn", "lightning-attn"]}, ("other", "full", "other")),
    ({"layer_types": ["jet", "attn", "swa"]}, ("other", "full", "sliding")),
    ({"layers_block_type": ["mamba", "attention", "mamba"]}, ("other", "full", "other")),
    ({"attn_layer_indices": [1]}, ("other", "full", "other")),
    ({"attn_layer_period": 2, "attn_layer_offset": 1}, ("other", "full", "other")),
    ({"linear_attn_config": {"full_attn_layers": [2]}}, ("other", "full", "other")),
    ({"full_attention_interval": 3}, ("other", "other", "full")),
    ({"hybrid_override_pattern": "M*-"}, ("other", "full", "other")),
    ({}, ("full", "full", "full")),
    ({"sliding_window": 4096, "use_sliding_window": False}, ("full", "full", "full")),
    ({"layer_types": ["full_attention"] * 3, "cross_attention_layers": [1]}, ("full", "other", "full")),
]


@pytest.mark.parametrize(("keys", "expected"), REMOTE)
def test_model_types_outside_transformers_are_read_by_their_keys(
    keys: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert layer_kinds({"model_type": "someones_hybrid", "num_hidden_layers": 3, **keys}) == expected


REFUSED = [
    ({"sliding_window": 4096}, "sliding_window=4096"),
    ({"sliding_window_pattern": 6}, "sliding_window_pattern=6"),
    ({"attention_chunk_size": 8192}, "attention_chunk_size=8192"),
    ({"attn_type_list": [0, 1, 0]}, "attn_type_list"),
    ({"layer_types": ["full_attention", "hyper_attention", "conv"]}, "hyper_attention.*not known"),
    ({"layer_types": ["full_attention", "conv"]}, "lists 2 layer kinds for num_hidden_layers=3"),
    ({"num_hidden_layers": None}, "names no number of decoder layers"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_is_not_understood_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_kinds({"model_type": "someones_hybrid", "num_hidden_layers": 3, **keys})


def test_text_config_finds_the_decoder_of_a_wrapper() -> None:
    raw = {
        "model_type": "outer",
        "vision_config": {"num_hidden_layers": 9},
        "thinker_config": {"text_config": {"n_layer": 2}},
    }
    text = text_config(raw)
    assert text["n_layer"] == 2
    assert text["outer_model_type"] == "outer"
