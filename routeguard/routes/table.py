"""The one table of architectures. Everything that needs to know where routing lives reads it through `resolve`.

A row says how a group of model types differs from `DEFAULT`: layer kinds from the config, separate q/k projections
(with the gate rule) or latent attention, half-split rotary embedding over the fraction of a head that the config names.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from routeguard.routes.architecture import (
    Architecture,
    if_memory_rope,
    if_position_type_is_rope,
    if_theta,
    if_theta_of_layer,
    in_dense_prefix,
    never,
    without_alibi,
    without_windows,
)
from routeguard.routes.collection import NORMALISED
from routeguard.routes.config import Config
from routeguard.routes.layer_kinds import KIND_OF_LABEL
from routeguard.routes.layer_patterns import rotates
from routeguard.routes.layouts import LAYOUTS
from routeguard.routes.model_types import ENCODERS, LATENT, PLAIN

DEFAULT = Architecture(model_types=())


def _hypenet_kinds(config: Config) -> tuple[str, ...]:
    return tuple(KIND_OF_LABEL[label] for label in config["mixer_types"])


def _longcat_kinds(config: Config) -> tuple[str, ...]:
    """A layer holds two attention modules; `num_hidden_layers` counts those."""
    return ("full",) * int(config.get("num_layers") or config["num_hidden_layers"] // 2)


def _hrm_kinds(config: Config) -> tuple[str, ...]:
    """Two stacks of `num_layers_per_stack` layers, run in turns; old configs call that number num_hidden_layers."""
    return ("full",) * (2 * int(config.get("num_layers_per_stack") or config["num_hidden_layers"]))


_SINKS = ("sinks",)
_SINK_NAMES = dict.fromkeys(("learnable_sink_param", "softmax_offset", "attention_sink_bias"), "sinks")

_ROWS: tuple[Architecture, ...] = (
    # -- hybrids -------------------------------------------------------------------------------------------------
    Architecture(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"),
        layout="separate",
        note="q_proj holds an output gate beside each head's query rows; only the query rows are routing",
    ),
    Architecture(("kimi_linear",), layout="latent", position=never, note="MLA without rotary embedding"),
    Architecture(("bailing_hybrid", "glm5_next", "glm5_next_text"), layout="latent"),
    Architecture(("olmo_hybrid",), layout="separate", position=if_theta),
    Architecture(("lara_mini",), layout="separate", position=never),
    Architecture(("minimax",), layout="separate", note="a set sliding_window narrows every softmax layer"),
    Architecture(("bamba",), layout="separate"),
    Architecture(("granitemoehybrid",), layout="separate", position=if_position_type_is_rope),
    Architecture(("jamba", "nemotron_h"), layout="separate", position=never),
    Architecture(("falcon_h1",), layout="separate", beside="Mamba-2"),
    Architecture(("lfm2", "lfm2_moe", "lfm3"), layout="separate"),
    Architecture(("zamba",), layout="separate", position=never, tied=True, note="one shared attention block"),
    Architecture(
        ("zamba2",), layout="shared_block_adapters", position=if_memory_rope, tied=True,
        note="shared blocks, with adapters for each use",
    ),
    Architecture(("zaya",), layout="mixed_qk", note="queries and keys are mixed"),
    Architecture(
        ("inkling_text", "inkling2_text", "inkling2_loop_text", "inkling_mm_model", "inkling2", "inkling2_loop"),
        layout="convolved_keys",
        position=never,
        auxiliary=("r_proj", "rel_logits_proj", "relative_position_bias", "sink_proj"),
        aliases={
            "wq_du": "q_proj.linear", "wk_dv": "k_proj.linear", "wv_dv": "v_proj.linear", "wo_ud": "o_proj.linear",
            "k_sconv": "k_proj.sconv", "q_l2_clip": "q_proj.norm", "rel_l2_clip": "relative_position_bias.norm",
            "wr_du": "relative_position_bias.linear", "attn_sink_proj": "sink_proj",
        },
    ),
    Architecture(
        ("hypenet",), layout="separate", kinds=_hypenet_kinds, position=never,
        note="remote code; attn_logits_scaling changes inference",
    ),
    Architecture(("jet_nemotron",), layout="separate", note="remote code; q and k carry biases"),
    # -- several attention modules a layer, several stacks, odd containers ---------------------------------------
    Architecture(("longcat_flash",), layout="latent", kinds=_longcat_kinds, note="two attention modules a layer"),
    Architecture(
        ("hrm_text",), layout="gated_fused", kinds=_hrm_kinds, stacks=("L_module.layers", "H_module.layers"),
        note="two stacks that run in turns: layers of L_module first, then those of H_module",
    ),
    Architecture(("git",), layout="separate", position=never, stacks=("git.encoder.layer",)),
    Architecture(
        ("blt", "blt_global_transformer"), layout="separate", pairing="interleaved",
        stacks=("global_transformer.layers",),
    ),
    # -- fused projections ---------------------------------------------------------------------------------------
    Architecture(("phi3", "phi4_multimodal"), layout="fused_blocks"),
    Architecture(("dbrx",), layout="fused_blocks"),
    Architecture(("mpt",), layout="fused_blocks", position=never),
    Architecture(("falcon",), layout="falcon", position=without_alibi),
    Architecture(("gpt_bigcode",), layout="gpt_bigcode", position=never),
    Architecture(("gpt2", "gpt-sw3", "openai-gpt"), layout="fused_columns", position=never),
    Architecture(("gpt_neox", "gpt_neox_japanese", "persimmon"), layout="fused_per_head"),
    Architecture(("bloom",), layout="fused_per_head", position=never),
    Architecture(("codegen",), layout="codegen", pairing="interleaved"),
    Architecture(("sarvam_moe",), layout="separate_or_fused", note="released checkpoints fuse the projections"),
    # -- rows of their own ---------------------------------------------------------------------------------------
    Architecture(("jetmoe",), layout="jetmoe"),
    Architecture(
        ("doge",), layout="masked_by_values", auxiliary=("dt_proj", "A"),
        note="values build the attention mask: v_proj, dt_proj and A shape the logits too",
    ),
    Architecture(
        ("deepseek_v4",), layout="compressed", auxiliary=_SINKS,
        aliases={
            "wq_a": "q_a_proj", "wq_b": "q_b_proj", "q_norm": "q_a_norm", "wkv": "kv_proj", "norm": "kv_norm",
            "wo_a": "o_a_proj", "wo_b": "o_b_proj", "compressor.wkv": "compressor.kv_proj",
            "compressor.wgate": "compressor.gate_proj", "compressor.ape": "compressor.position_bias",
            "compressor.norm": "compressor.kv_norm", "attn_sink": "sinks",
        },
        note="keys are the values: only query rows are pure",
    ),
    Architecture(("dory",), layout="separate", auxiliary=("sqk",), obstacle=NORMALISED),
    Architecture(
        ("muse_glimmer", "muse_glimmer_text", "muse_spark", "muse_spark_text"), layout="separate",
        position=if_theta_of_layer,
        obstacle=NORMALISED,
    ),
    Architecture(("nanochat",), layout="separate", obstacle=NORMALISED),
    Architecture(
        ("mistral_large4", "mistral_large4_text"), layout="latent", auxiliary=("softmax_scaling",),
        aliases={
            "wq": "q_proj", "wq_a": "q_a_proj", "wq_b": "q_b_proj", "q_a_norm": "q_a_layernorm", "wo": "o_proj",
            "wkv_a_with_mqa": "kv_a_proj_with_mqa", "wkv_b": "kv_b_proj", "kv_a_norm": "kv_a_layernorm",
            "ssmax_scaling.s": "softmax_scaling.scale", "ssmax_scaling.b": "softmax_scaling.bias",
        },
    ),
    Architecture(("axk2",), layout="latent", aliases={"q_b_proj": "q_gate_proj"}, note="a gate beside the queries"),
    Architecture(
        ("cosmos3_omni", "cosmos3_edge"), layout="separate",
        aliases={
            "to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "o_proj",
            "norm_q": "q_norm", "norm_k": "k_norm",
        },
    ),
    Architecture(
        ("molmo2", "molmo2_text"), layout="separate_or_fused", aliases={"attn_out": "o_proj"},
        note="checkpoints fuse the projections",
    ),
    Architecture(("hy_v4", "hy_v4_vl", "hy_v4_vl_text"), auxiliary=_SINKS, aliases=_SINK_NAMES),
    # -- plain projections with a learned sink in the softmax ----------------------------------------------------
    Architecture(("gpt_oss", "mimo_v2_flash"), auxiliary=_SINKS, aliases=_SINK_NAMES),
    # -- plain projections, position embeddings that differ ------------------------------------------------------
    Architecture(("gptj",), layout="separate", pairing="interleaved"),
    Architecture(
        (
            "cohere", "glm", "glm4", "glm4v_text", "glm_ocr_text", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text",
            "helium",
        ),
        layout="separate",
        pairing="interleaved",
    ),
    Architecture(
        ("cohere2", "afmoe", "beam"), layout="separate", position=never, note="full layers do not rotate"
    ),
    Architecture(
        ("flint",), position=never, auxiliary=_SINKS, aliases=_SINK_NAMES, note="full layers do not rotate"
    ),
    Architecture(("cohere2_moe",), position=in_dense_prefix, note="full layers after the dense ones do not rotate"),
    Architecture(("exaone4", "exaone_moe", "kolibri1"), position=without_windows),
    Architecture(("llama4", "llama4_text"), layout="separate", pairing="interleaved", position=rotates),
    Architecture(("smollm3",), layout="separate", position=rotates),
    Architecture(
        (
            "gpt_neo", "opt", "biogpt", "xglm", "ctrl", "cpmant", "trocr", "blip_text_model", "kosmos_2_text_model",
            "kosmos_2_5_text_model",
        ),
        layout="separate",
        position=never,
    ),
    # -- nothing unusual (the tests check each of them) -----------------------------------------------------------
    Architecture(LATENT, layout="latent"),
    Architecture(PLAIN, layout="separate"),
)  # fmt: skip

_BY_TYPE: dict[str, Architecture] = {name: row for row in _ROWS for name in row.model_types}


def architecture_of(model_type: str, outer_model_type: str = "") -> tuple[Architecture, bool]:
    """The row for a model type, and whether there is one. A wrapper's own row goes before its decoder's."""
    for name in (outer_model_type, model_type):
        if name in _BY_TYPE:
            return _BY_TYPE[name], True
    return DEFAULT, False


def register_architecture(architecture: Architecture) -> None:
    """Add a row to the table (or replace one) for this process.

    Args:
        architecture: the row; `layout` names one of `layouts.LAYOUTS` or is a function from a `Block` to a `Found`.

    Raises:
        ValueError: no model type given, or a layout name that does not exist.
    """
    if not architecture.model_types:
        raise ValueError("an architecture needs at least one model type (the config's model_type)")
    if isinstance(architecture.layout, str) and architecture.layout not in LAYOUTS:
        close = get_close_matches(architecture.layout, LAYOUTS, n=1)
        hint = f"; closest {close[0]!r}" if close else ""
        raise ValueError(f"layout {architecture.layout!r} does not exist{hint}; layouts: {', '.join(LAYOUTS)}")
    for name in architecture.model_types:
        _BY_TYPE[name] = architecture


def unregister_architecture(model_type: str) -> None:
    """Take a registered row out again; the built-in row, if any, comes back."""
    _BY_TYPE.pop(model_type, None)
    for row in _ROWS:
        if model_type in row.model_types:
            _BY_TYPE[model_type] = row


def architectures() -> tuple[Architecture, ...]:
    """All rows, built-in and registered, each once, with the model types that it currently serves."""
    rows: dict[int, Architecture] = {}
    for row in _BY_TYPE.values():
        rows.setdefault(id(row), row)
    return tuple(
        replace(row, model_types=tuple(name for name in row.model_types if _BY_TYPE.get(name) is row))
        for row in rows.values()
    )


def is_encoder(config: Config) -> bool:
    """A bidirectional encoder: nothing to guard. (The same type with `is_decoder` is a decoder.)"""
    return str(config.get("model_type")) in ENCODERS and not config.get("is_decoder")
