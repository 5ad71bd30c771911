"""Decoder-only models whose layers are all softmax attention: full, sliding, chunked or sparse."""

from __future__ import annotations

from tests.zoo.case import Case, mrope, text
from tests.zoo.tiny import WINDOW

# The generic tiny config is all these need.
PLAIN = """
    afmoe apertus apertus1p5_text arcee aria_text beam biogpt bitnet bloom cohere cohere2 cohere2_moe cwm diffllama
    ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe gpt-sw3
    gpt2 gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 llama llama4_text
    mimo_v2_flash minimax_m2 mpt nanochat nemotron olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phimoe
    qwen3_moe sarvam_moe seed_oss solar_open stablelm starcoder2 trocr vaultgemma xglm
"""

MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"] * 2

GEMMA3N_TEXT = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 8}

WINDOWED = [
    text("dots1"),
    text("dots1/window", max_window_layers=3, use_sliding_window=True, sliding_window=WINDOW),
    text("laguna", layer_types=MIXED_LAYERS),
    text("mellum", layer_types=MIXED_LAYERS),
    text("ministral", layer_types=MIXED_LAYERS),
    text("ministral/window"),
    text("ministral3", sliding_window=None),
    text("ministral3/window", sliding_window=WINDOW),
    text("mistral", sliding_window=None),
    text("mistral/window", sliding_window=WINDOW),
    text("mixtral", sliding_window=None),
    text("mixtral/window", sliding_window=WINDOW),
    text("phi3", sliding_window=None),
    text("phi3/window", sliding_window=WINDOW),
    text("phimoe/window", sliding_window=WINDOW),
    text("starcoder2/window", sliding_window=WINDOW),
    text("modernbert-decoder"),
    text("gpt_neo", attention_types=[[["global", "local"], 2]]),
    text("gpt_neo/global", attention_types=[[["global"], 4]]),
    text("dory", n_input_layers=1, n_output_layers=1),
    text("qwen2"),
    text("qwen2/window", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    text("qwen3"),
    text("qwen3/window", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    text("qwen2_moe"),
    text("qwen2_moe/window", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    text("qwen3_moe/window", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=3),
    text("smollm3"),
    text("smollm3/window", use_sliding_window=True, sliding_window=WINDOW, no_rope_layer_interval=3),
    text("minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"] * 3),
]

COMPASS_TEXT = {
    "layer_types": MIXED_LAYERS,
    "rope_parameters": {"full_attention": mrope(4, 2, 2), "sliding_attention": mrope(4, 2, 2)},
}
OPTIONS = [
    text("llama/bias", attention_bias=True),
    text("llama/heads", num_key_value_heads=4),
    text("phi/qk_norm", hidden_size=64, qk_layernorm=True),
    text("stablelm/qk_norm", qk_layernorm=True),
    text("cohere/qk_norm", use_qk_norm=True),
    text("glm4_moe/qk_norm", use_qk_norm=True),
    text("cohere_compass_text", **COMPASS_TEXT),
]

FUSED = [
    text("codegen", rotary_dim=8, n_ctx=64, n_head=4, n_embd=64),
    text("gptj", rotary_dim=8),
    text("falcon", multi_query=True, new_decoder_architecture=False),
    text("falcon/groups", new_decoder_architecture=True),
    text(
        "falcon/heads",
        multi_query=False,
        num_kv_heads=4,
        alibi=True,
        new_decoder_architecture=False,
        parallel_attn=False,
        bias=True,
    ),
    text("gpt_bigcode", multi_query=True),
    text("gpt_bigcode/heads", multi_query=False),
    text("gpt2/cross_layer_scale", scale_attn_by_inverse_layer_idx=True),
    text(
        "dbrx",
        attn_config={"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 56, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    text("jetmoe", kv_channels=16),
    text("doge"),
    text("doge/experts", is_moe=True, num_experts=4, num_experts_per_tok=2),
    text("ctrl", dff=56),
    text("cpmant", dim_head=16, dim_ff=56, position_bias_num_buckets=16, prompt_length=4),
    text("helium", hidden_size=64),
    text("hrm_text", num_hidden_layers=2, H_cycles=1, L_cycles=2),
]

DOTS3_TEXT = {
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 28,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 10,
    "sliding_window": WINDOW,
    "shared_experts_intermediate_size": 24,
}

LATENT = [
    text("dots3_note_text/no_indexer", use_dsa=False, **DOTS3_TEXT),
    text("axk1"),
    text("axk2"),
    text("deepseek_v2", q_lora_rank=20),
    text("deepseek_v2/no_q_lora", q_lora_rank=None),
    text("deepseek_v3", q_lora_rank=20),
    text("deepseek_v3/no_q_lora", q_lora_rank=None),
    text("deepseek_v32"),
    text(
        "deepseek_v4",
        num_key_value_heads=1,
        layer_types=["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"] * 2,
    ),
    text("dots3_note_text", **DOTS3_TEXT),
    text("glm4_moe_lite"),
    text("glm_moe_dsa"),
    text("hy_v4"),
    text("longcat_flash", zero_expert_num=2, head_dim=4),
    text("minicpm3"),
    text("sarvam_mla"),
    text("youtu"),
]

SHARED_KEYS = [
    text("gemma3n_text", **GEMMA3N_TEXT),
    text("gemma4_unified_text", global_head_dim=24),
    text("gemma4_text", global_head_dim=24),
    text("gemma4_text/k_eq_v", global_head_dim=24, attention_k_eq_v=True, num_global_key_value_heads=1),
    text(
        "gemma4_text/kv_sharing",
        global_head_dim=24,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
]

DECODER_CASES: list[Case] = [
    *(text(name) for name in PLAIN.split()),
    *WINDOWED,
    *OPTIONS,
    *FUSED,
    *LATENT,
    *SHARED_KEYS,
]
