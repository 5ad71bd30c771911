"""Vision-language wrappers whose text decoder is a causal language model."""

from __future__ import annotations

from tests.zoo.case import Case, image_text, mrope, runs, stub_tower
from tests.zoo.decoders import COMPASS_TEXT, GEMMA3N_TEXT, MIXED_LAYERS
from tests.zoo.hybrids import INKLING_LOOP, NEMOTRON_TEXT, QWEN4_TEXT
from tests.zoo.tiny import NUM_TOKENS, WINDOW

PLAIN = """
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl exaone4_5 gemma3 git got_ocr2 hyperclovax_vision_v2
    idefics3 internvl kimi_k25 lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr
    minicpmv4_6 minicpmv4_7 mistral4 mistral_large4 mllama muse_glimmer ovis2 paligemma pp_chart2table qianfan_ocr
    qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe shieldgemma2 smolvlm video_llama_3 video_llava vipllava
"""

MROPE_TEXT = {"rope_parameters": mrope(4, 2, 2)}

# Image encoders of discrete tokens keep two resolutions and few codes.
TINY_VQ = {"channel_multiplier": [1, 1], "num_embeddings": 16}

WITH_OVERRIDES = [
    image_text("chameleon", vocabulary_map={"<image>": 90}, vq_config=TINY_VQ),
    image_text("cohere_compass", text_config=COMPASS_TEXT),
    image_text("cosmos3_edge", text_config=MROPE_TEXT),
    image_text(
        "deepseek_ocr2",
        text_config={"mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2},
        vision_config={"sam_config": {"downsample_channels": [8, 8]}},
    ),
    image_text("deepseek_vl_hybrid"),
    image_text("emu3", vocabulary_map={"<image>": 90}, vq_config={"channel_multiplier": [1, 1], "codebook_size": 16}),
    image_text("ernie4_5_vl_moe", text_config={"moe_intermediate_size": [24, 24], "rope_parameters": mrope(3, 3, 2)}),
    # The real towers of fast_vlm and perception_lm need the timm package; any image tower serves.
    image_text("fast_vlm", vision_config={"model_type": "siglip_vision_model"}),
    image_text("perception_lm", vision_config={"model_type": "siglip_vision_model", "model_args": {"embed_dim": 64}}),
    stub_tower(
        image_text(
            "gemma3n",
            text_config=GEMMA3N_TEXT,
            vision_config={"vocab_offset": 80, "vocab_size": 8},
            audio_config={"vocab_offset": 88, "vocab_size": 8},
        )
    ),
    image_text("minimax_m3_vl", text_config={"layer_types": ["full_attention", "minimax_m3_sparse"] * 3}),
    image_text(
        "gemma4",
        text_config={"global_head_dim": 24},
        vision_config={},
        audio_config={"subsampling_conv_channels": [8, 8]},
    ),
    image_text(
        "gemma4_unified",
        text_config={"global_head_dim": 24},
        vision_config={"mm_embed_dim": 48, "mm_posemb_size": 8},
        audio_config={"audio_embed_dim": 16},
    ),
    *(image_text(name, text_config=MROPE_TEXT) for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")),
    image_text("glm4v_moe", text_config={"rope_parameters": mrope(2, 1, 1, partial_rotary_factor=0.5)}),
    image_text(
        "glm5_next", text_config={"index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 4, "qk_rope_head_dim": 0}
    ),
    image_text("granite4_vision", deepstack_layer_map=[[0, 0]], spatial_target_layers=[1], downsample_rate="1/2"),
    image_text("granite_docling"),
    image_text("hunyuan_vl", text_config=MROPE_TEXT),
    image_text("hy_v4_vl", text_config={"rope_parameters": mrope(1, 1, 0)}),
    image_text("inkling2"),
    image_text("inkling2_loop", text_config=INKLING_LOOP),
    image_text(
        "inkling_mm_model",
        text_config={"local_layer_ids": [0, 1, 3, 4]},
        vision_config={"num_hidden_layers": 6, "patch_size": 4},
    ),
    *(image_text(name, text_config={"sliding_window": None}) for name in ("idefics2", "mistral3")),
    image_text("mistral3/window", text_config={"sliding_window": WINDOW}),
    image_text("janus", vq_config={**TINY_VQ, "latent_channels": 8, "image_token_embed_dim": 32, "projection_dim": 32}),
    image_text("lfm2_vl", text_config={"full_attn_idxs": [2, 5]}),
    # The wrapper's forward always raises in transformers 5.24: it reads a field that its text model does not return.
    runs("language_model", image_text("llama4")),
    image_text("molmo2", vision_config={"image_size": [16, 16]}, adapter_config={"vision_feature_layer": [3, 2]}),
    image_text("muse_spark", audio_config={"hidden_sizes": [8, 8, 8, 8]}),
    image_text(
        "nemotron_h_omni",
        text_config=NEMOTRON_TEXT,
        audio_config={"projection_hidden_size": 32, "projection_bias": False},
    ),
    image_text("qwen2_5_vl", text_config=MROPE_TEXT),
    image_text("qwen2_vl", text_config=MROPE_TEXT),
    image_text("qwen4_exp", text_config=QWEN4_TEXT),
    image_text(
        "step3p7", vision_config={"mlp_ratio": 1.0}, text_config={"sliding_window": WINDOW, "layer_types": MIXED_LAYERS}
    ),
    image_text(
        "unlimited_ocr",
        text_config={"num_key_value_heads": 4},
        vision_config={"sam_config": {"downsample_channels": [8, 8]}},
    ),
    image_text("qwen2_5_omni_thinker", text_config=MROPE_TEXT),
    image_text("qwen3_omni_moe_thinker"),
]

IMAGE = (1, 3, 16, 16)
WITH_IMAGES = [
    image_text("blip", {"pixel_values": IMAGE}),
    image_text("blip-2", {"pixel_values": IMAGE}, image_token_index=90),
    image_text("instructblip", {"pixel_values": IMAGE, "qformer_input_ids": "tokens"}, image_token_index=90),
    image_text("instructblipvideo", {"pixel_values": (1, *IMAGE), "qformer_input_ids": "tokens"}, video_token_index=90),
    image_text("idefics", {"pixel_values": (1, *IMAGE), "image_attention_mask": (1, NUM_TOKENS, 1)}),
    image_text("kosmos-2", {"image_embeds": (1, 0, 64), "image_embeds_position_mask": "zeros"}),
    image_text("kosmos-2.5"),
]

MULTIMODAL_CASES: list[Case] = [*(image_text(name) for name in PLAIN.split()), *WITH_OVERRIDES, *WITH_IMAGES]
