"""Shrink any transformers config class to a tiny one, field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tests.zoo.config_class import SubConfig, config_defaults, settable, sub_config_specs
from tests.zoo.earlier import SQUARE_EARLIER

NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 16
VOCAB_SIZE = 96
WINDOW = 8
NUM_TOKENS = 24  # of an example input; longer than any window

# A field named here is set whenever the class has it. H * head_dim = 64, KV * head_dim = 32 and hidden = 48 are all
# different, so that a mix-up of two of them changes a shape.
TINY_FIELDS: dict[str, Any] = {
    # sizes of the decoder
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 48,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "intermediate_size": 56,
    "ffn_dim": 56,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "n_inner": 56,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    # depth
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 4,
    # heads
    "num_attention_heads": NUM_HEADS,
    "n_head": NUM_HEADS,
    "n_heads": NUM_HEADS,
    "num_heads": NUM_HEADS,
    "attention_heads": NUM_HEADS,
    "encoder_attention_heads": NUM_HEADS,
    "decoder_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "swa_num_attention_heads": NUM_HEADS,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 8,
    "global_head_dim": 24,
    # latent attention
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 16,
    "v_head_dim": 10,
    "o_lora_rank": 12,
    "o_groups": 2,
    "rel_extent": 32,
    "d_rel": 6,
    # top-k indexers
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 12,
    # windows
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "local_attention": WINDOW,
    "window_size": WINDOW,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "router_hidden_size": 16,
    "dense_intermediate_size": 56,
    "ffn_hidden_size": 56,
    "moe_shared_expert_intermediate_size": 24,
    # linear attention and state space layers
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
    "ssm_state_size": 8,
    "state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 8,
    # token ids inside the tiny vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    # vision and audio towers and their projectors
    "depth": 2,
    "image_size": 16,
    "patch_size": 8,
    "out_hidden_size": 48,
    "projection_dim": 48,
    "text_hidden_size": 48,
    "adapter_in_dim": 64,
    "adapter_out_dim": 48,
    "adapter_input_size": 64,
    "output_dim": 48,
    "mlp_dim": 56,
    "output_channels": 8,
    "vision_output_dim": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "global_attn_indexes": [1],
    "projector_hidden_size": 32,
    "projection_hidden_dim": 32,
    "projection_intermediate_size": 32,
    "alignment_intermediate_size": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "downsample_hidden_size": 8,
    "encoder_hidden_size": 64,
    "hidden_dim": 32,
    "dim_head": 8,
    "num_filters": 2,
    "num_mel_bins": 16,
    "base_channels": 32,
    "resampler_head_dim": 8,
    "max_num_patches": 16,
    "latent_query_num": 4,
    "max_image_size": 32,
    "max_img_size": 16,
    "share_expert_dim": 24,
    "moe_hidden_size": 40,
    "n_mel_bins": 4,
    "mel_vocab_size": 8,
    "nemo_conv_channels": 8,
    "ext_pw_out_channel": 64,
    "depthwise_separable_out_channel": 64,
    "n_groups": 1,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "subsampling_conv_channels": 8,
    "num_codebooks": 2,
    "position_embedding_size": 16,
    "output_proj_dims": 48,
    "hidden_size_global": 64,
    "codebook_size": 16,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "latent_channels": 8,
    "num_embeddings": 16,
    "flow_hidden_size": 16,
    "layers": 4,
}


# Model types that derive head_dim from hidden_size; they (and towers) get hidden_size = 64.
SQUARE = frozenset(
    """
    axk1 bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher chameleon deepseek_v3
    glm4_moe_lite glm4v_text kimi_linear mllama_text_model olmoe qwen2_5_vl_text qwen2_vl_text sarvam_mla stablelm
    youtu zamba zamba2
    """.split()  # noqa: SIM905
)

# Fields whose default None means "switched off"; a tiny value would switch them on.
OPTIONAL_FIELDS = frozenset(
    {
        "sliding_window",
        "unpadded_vocab_size",
        "ffn_hidden_size",
        "q_lora_rank",
        "num_experts",
        "moe_intermediate_size",
        "n_group",
        "topk_group",
    }
)


def tiny_fields(config_class: type, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that make `config_class` tiny; mappings in `overrides` go to the sub-config of that name."""
    defaults = config_defaults(config_class)
    fields = {
        name: value
        for name, value in TINY_FIELDS.items()
        if name in defaults and not (name in OPTIONAL_FIELDS and defaults[name] is None)
    }
    if "hidden_size" in defaults and "head_dim" not in defaults:
        square = SQUARE if dataclasses.is_dataclass(config_class) else SQUARE | SQUARE_EARLIER
        if "vocab_size" in defaults and "num_key_value_heads" in defaults and config_class.model_type not in square:
            fields["head_dim"] = HEAD_DIM  # not a field, but read where present
        else:
            fields["hidden_size"] = NUM_HEADS * HEAD_DIM
    if "layer_types" in defaults and "num_hidden_layers" in defaults:
        fields["num_hidden_layers"] = 6
    if "kv_lora_rank" in defaults:
        fields["num_key_value_heads"] = NUM_HEADS
    sub_configs = sub_config_specs(config_class)
    for name, spec in sub_configs.items():
        if name in overrides or not spec.optional:
            fields[name] = tiny_sub_config(spec, overrides.get(name, {}))
    plain = {name: value for name, value in overrides.items() if name not in sub_configs}
    return {**fields, **settable(config_class, plain)}


def tiny_sub_config(spec: SubConfig, overrides: Mapping[str, Any] | None) -> Any:
    """A tiny sub-config; `model_type` in `overrides` chooses the class where transformers leaves it open."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if overrides is None:
        return None
    settings = {**{k: v for k, v in spec.init_kwargs.items() if k not in TINY_FIELDS}, **overrides}
    model_type = settings.pop("model_type", spec.model_type)
    chosen = spec.config_class is AutoConfig or "model_type" in overrides
    config_class = CONFIG_MAPPING[model_type] if chosen else spec.config_class
    config = tiny_config(config_class, settings)
    return config.to_dict() if spec.as_mapping else config


def tiny_config(config_class: type, overrides: Mapping[str, Any]) -> Any:
    """An instance of `config_class` with tiny sizes."""
    return config_class(**tiny_fields(config_class, overrides))
