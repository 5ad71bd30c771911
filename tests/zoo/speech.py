"""Wrappers for speech, proteins and bytes whose text decoder is a causal language model."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, image_text, runs, text, wrapper
from tests.zoo.decoders import DOTS3_TEXT
from tests.zoo.hybrids import NEMOTRON_TEXT
from tests.zoo.multimodal import MROPE_TEXT


def speech(name: str, /, **overrides: Any) -> Case:
    """A wrapper of the multimodal auto class."""
    return wrapper(name, "AutoModelForMultimodalLM", **overrides)


PROTEIN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "vocab_size": 96,
}
# Audio encoders that keep two stages.
TINY_ENCODER = {"depths": [1, 1], "downsampling_ratios": [2]}
CODEC = {"upsample_groups": 4, "num_quantizers": 2}

SPEECH_CASES: list[Case] = [
    speech("fun_asr_nano", adaptor_config={"hidden_size": 48, "intermediate_size": 12}),
    speech("glmasr"),
    speech("granite_speech"),
    speech("granite_speech_plus"),
    wrapper(
        "kyutai_speech_to_text",
        "AutoModelForMultimodalLM",
        {"input_ids": ("tokens", 3)},
        codebook_vocab_size=96,
        audio_pad_token_id=3,
        audio_bos_token_id=90,
        codec_config=CODEC,
    ),
    speech(
        "nemo_speechlm",
        text_config=NEMOTRON_TEXT,
        word_timestamp_config={"blank_token_id": 95},
        audio_config={"diarization_config": {"head_config": {"audio_hidden_size": 64}}},
    ),
    speech(
        "omniasr",
        audio_config={
            "conv_dim": [8, 8],
            "conv_kernel": [3, 3],
            "conv_stride": [2, 2],
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    runs("thinker", speech("qwen2_5_omni", enable_audio_output=False, thinker_config={"text_config": MROPE_TEXT})),
    speech("qwen2_audio"),
    speech("qwen3_asr"),
    runs("thinker", speech("qwen3_omni_moe", enable_audio_output=False)),
    speech(
        "vibevoice_asr", semantic_tokenizer_encoder_config=TINY_ENCODER, acoustic_tokenizer_encoder_config=TINY_ENCODER
    ),
    speech("voxtral"),
    runs("model.language_model", wrapper("voxtral_realtime", "AutoModelForMultimodalLM", {"t_cond": (1, 48)})),
    wrapper("audioflamingo3", "AudioFlamingo3ForConditionalGeneration"),
    wrapper("musicflamingo", "MusicFlamingoForConditionalGeneration"),
    wrapper(
        "vibevoice", "VibeVoiceForConditionalGeneration", audio_config=TINY_ENCODER, semantic_model_config=TINY_ENCODER
    ),
    wrapper("higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration"),
    wrapper(
        "csm",
        "CsmForConditionalGeneration",
        text_vocab_size=96,
        depth_decoder_config={"backbone_hidden_size": 48},
        codec_config=CODEC,
    ),
    wrapper("glm_image", "GlmImageForConditionalGeneration", text_config={**MROPE_TEXT, "vision_vocab_size": 96}),
    wrapper(
        "evolla",
        "EvollaForProteinText2Text",
        resampler_depth=1,
        resampler_dim_head=8,
        aligner_num_add_layers=2,
        protein_encoder_config=PROTEIN,
    ),
    text("phi4_multimodal", audio_config={"num_blocks": 2}),
    text("moshi"),
    text("moss_transcribe_diarize"),
    text("fuyu"),
    image_text(
        "apertus1p5",
        image_token_offset=64,
        audio_token_offset=80,
        vision_config={"channel_multiplier": [1, 1], "num_res_blocks": 1},
        audio_config={"codebook_dim": 64},
    ),
    text(
        "dots3_note",
        text_config=DOTS3_TEXT,
        vision_config={"mlp_layer_types": ["dense"] * 4},
        audio_config={"adapter_input_size": 48},
    ),
    wrapper("blt", "AutoModelForCausalLM", {"use_cache": False}, encoder_hash_byte_group_vocab=32, cross_attn_k=2),
    wrapper("emu3_text_model", "Emu3ForCausalLM"),
    wrapper("mllama_text_model", "MllamaForCausalLM"),
]
