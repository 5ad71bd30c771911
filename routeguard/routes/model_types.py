"""Model types that need no row of their own, and encoders. The tests run every decoder named here."""

from __future__ import annotations

# Queries and keys in projections of their own, rotary embedding as configured.
PLAIN = (
    "apertus", "apertus1p5_text", "arcee", "aria_text", "bitnet", "chameleon", "cohere_compass_text",
    "cosmos3_edge_text", "csm", "cwm", "deepseek_ocr2_text", "diffllama", "diffusion_gemma_text", "dots1",
    "emu3_text_model", "evolla", "exaone", "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text",
    "gemma4_text", "gemma4_unified_text", "glm4_moe", "glm4v_moe_text", "glm_image_text", "granite",
    "granite4_vision_text", "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "higgs_audio_v2", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "hyperclovax", "idefics",
    "internlm3", "iquestcoder", "jais2", "kyutai_speech_to_text", "laguna", "llama", "mellum", "minimax_m2",
    "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama_text_model", "modernbert-decoder",
    "moshi", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "paddleocr_vl_text", "phi", "phimoe", "qwen2",
    "qwen2_5_omni_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3",
    "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "recurrent_gemma", "seed_oss",
    "solar_open", "stablelm", "starcoder2", "step3p5", "unlimited_ocr_text", "vaultgemma", "voxtral_realtime_text",
)  # fmt: skip

# Multi-head latent attention as DeepSeek-V2 introduced it.
LATENT = (
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
    "mistral4", "sarvam_mla", "youtu",
)  # fmt: skip

# Bidirectional encoders (the same types with `is_decoder` are decoders).
ENCODERS = (
    "albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
    "ernie", "esm", "flaubert", "funnel", "ibert", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert",
    "modernbert", "mpnet", "mra", "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "yoso",
)  # fmt: skip
