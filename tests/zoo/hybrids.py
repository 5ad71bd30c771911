"""Hybrids: a few full-attention layers among linear-attention, state-space or convolution layers."""

from __future__ import annotations

from tests.zoo.case import Case, text
from tests.zoo.tiny import WINDOW

LINEAR_LAST_FULL = ["linear_attention", "full_attention"] * 2
MAMBA2 = {"mamba_n_heads": 8}

NEMOTRON_TEXT = {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "mlp", "full_attention"]
}
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
INKLING_LOOP = {
    "n_layers_per_attn_res_block": 2,
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 4,
    "loop_num_passes": 2,
    "loop_gate_rank": 8,
}
SHARED_BLOCKS = {"layers_block_type": ["linear_attention", "hybrid"] * 3, "num_hidden_layers": 6}

ZAMBA2 = {**SHARED_BLOCKS, "num_mem_blocks": 2, "adapter_rank": 4, "num_key_value_heads": 4}

HYBRID_CASES: list[Case] = [
    text("bailing_hybrid", layer_group_size=3),
    text("bailing_hybrid/q_lora", layer_group_size=3, q_lora_rank=20),
    text("bamba", attn_layer_indices=[1, 3], **MAMBA2),
    text("falcon_h1", mamba_d_ssm=128, **MAMBA2),
    text("granitemoehybrid", layer_types=LINEAR_LAST_FULL, num_hidden_layers=4, **MAMBA2),
    text("inkling_text", local_layer_ids=[0, 1, 3, 4]),
    text("inkling2_text"),
    text("inkling2_loop_text", **INKLING_LOOP),
    text("jamba", attn_layer_period=2, attn_layer_offset=1),
    text("kimi_linear", linear_head_dim=8, linear_num_heads=4),
    text("kimi_linear/q_lora", linear_head_dim=8, linear_num_heads=4, q_lora_rank=20),
    text("lara_mini"),
    text("lfm2", full_attn_idxs=[2, 5]),
    text("lfm2_moe", layer_types=["conv", "conv", "full_attention"] * 2),
    text("lfm3"),
    text("lfm3/no_gate", use_attention_gate=False),
    text("zaya/full", num_experts_per_tok=1),
    text("minimax"),
    text("minimax/window", sliding_window=WINDOW),
    text("nemotron_h", **NEMOTRON_TEXT),
    # The model ignores its window: outputs are those of the plain case.
    text("nemotron_h/window", sliding_window=WINDOW, **NEMOTRON_TEXT),
    text("olmo_hybrid"),
    text("qwen3_next"),
    text("qwen3_5_text"),
    text("qwen3_5_moe_text"),
    text("qwen4_exp_text", **QWEN4_TEXT),
    text("recurrent_gemma"),
    text("zamba", **SHARED_BLOCKS),
    text("zamba2", use_shared_attention_adapter=True, use_mem_rope=True, **ZAMBA2),
    text("zamba2/no_adapter", **ZAMBA2),
    text("zaya", num_experts_per_tok=1, layer_types=["hybrid_sliding", "hybrid"] * 3, sliding_window=WINDOW),
]
