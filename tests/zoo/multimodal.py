"""Multimodal wrappers whose text decoder is a causal language model."""

from __future__ import annotations

from tests.zoo.case import Case, image_text

PLAIN = """
    gemma3 gemma4_unified git qwen3_5 qwen3_5_moe aria deepseek_vl exaone4_5 hyperclovax_vision_v2 idefics3 internvl
    minicpm_ocr minicpmv4_6 minicpmv4_7 ovis2 qianfan_ocr shieldgemma2 smolvlm video_llama_3
""".split()

MULTIMODAL_CASES: list[Case] = [*(image_text(name) for name in PLAIN)]
