"""Vision-language wrappers whose text decoder is a causal language model."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, image_text
from tests.zoo.tiny import WINDOW

PLAIN = """
    aria aya_vision cohere2_vision deepseek_vl exaone4_5 gemma3 gemma4_unified git got_ocr2 hyperclovax_vision_v2 idefics2 idefics3
    internvl kimi_k25 lfm3_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax_m3_vl mistral3 mistral4 mistral_large4 mllama muse_glimmer ovis2 paligemma pp_chart2table qianfan_ocr qwen3_5 qwen3_5_moe qwen3_vl
    qwen3_vl_moe cosmos3_omni shieldgemma2 smolvlm unlimited_ocr video_llama_3 video_llava vipllava
""".split()


def mrope(*sections: int, **settings: Any) -> dict[str, Any]:
    """Rotary settings with a position stream for each of time, height and width."""
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **settings}


MROPE_TEXT = {"rope_parameters": mrope(4, 2, 2)}

PLE = {"hidden_size_per_layer_input": 8}
QWEN4_TEXT = {
    "ngram_vocab_size_base": 50,
    "split_ngram_parts": 1,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}

WITH_OVERRIDES = [
    image_text("chameleon", vocabulary_map={"<image>": 90}),
    image_text("emu3", vocabulary_map={"<image>": 90}),
    image_text("cohere_compass", text_config={"rope_parameters": {"full_attention": mrope(4, 2, 2)}}),
    image_text("cosmos3_edge", text_config=MROPE_TEXT),
    image_text("deepseek_ocr2"),
    image_text("deepseek_vl_hybrid"),
    image_text("ernie4_5_vl_moe", text_config={"moe_intermediate_size": [24, 24], "rope_parameters": mrope(3, 3, 2)}),
    image_text("fast_vlm", vision_config={"model_type": "siglip_vision_model"}),
    image_text("gemma4", text_config={"global_head_dim": 24}),
    *(image_text(name, text_config=MROPE_TEXT) for name in ("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")),
    image_text("glm4v_moe", text_config={"rope_parameters": mrope(2, 1, 1, partial_rotary_factor=0.5)}),
    image_text("glm5_next", text_config={"index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 4}),
    image_text("granite4_vision", deepstack_layer_map=[[0, 0]], spatial_target_layers=[1], downsample_rate="1/2"),
    image_text("granite_docling", vision_config={"out_hidden_size": 64}),
    image_text("hunyuan_vl", text_config=MROPE_TEXT),
    image_text("hy_v4_vl", text_config={"rope_parameters": mrope(1, 1, 0)}),
    image_text("inkling2"),
    image_text("inkling2_loop", text_config={"n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 8}),
    image_text("inkling_mm_model", vision_config={"num_hidden_layers": 8}),
    image_text("janus", vq_config={"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 16}),
    image_text("lfm2_vl", text_config={"full_attn_idxs": [2, 5]}),
    image_text("molmo2", vision_config={"image_size": [16, 16]}),
    image_text("muse_spark", audio_config={"hidden_sizes": [8, 8, 8, 8]}),
    image_text("nemotron_h_omni", vision_config={"max_img_size": 16}),
    image_text("perception_lm", vision_config={"model_type": "siglip_vision_model", "model_args": {"embed_dim": 64}}),
    image_text("qwen2_5_vl", text_config=MROPE_TEXT),
    image_text("qwen2_vl", text_config=MROPE_TEXT),
    image_text("qwen4_exp", text_config=QWEN4_TEXT),
    image_text("step3p7", text_config={"sliding_window": WINDOW}),
    image_text("qwen2_5_omni_thinker", text_config=MROPE_TEXT),
    image_text("qwen3_omni_moe_thinker"),
    image_text("blip"),
    image_text("blip-2"),
    image_text("diffusion_gemma"),
    image_text("idefics"),
    image_text("instructblip"),
    image_text("instructblipvideo"),
    image_text("kosmos-2"),
    image_text("kosmos-2.5"),
]

MULTIMODAL_CASES: list[Case] = [*(image_text(name) for name in PLAIN), *WITH_OVERRIDES]
