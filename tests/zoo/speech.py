"""Speech wrappers whose text decoder is a causal language model, and byte-level models with several transformers."""

from __future__ import annotations

from typing import Any

from tests.zoo.case import Case, text, wrapper
from tests.zoo.multimodal import MROPE_TEXT
from tests.zoo.hybrids import NEMOTRON_TEXT


def speech(name: str, /, **overrides: Any) -> Case:
    """A wrapper of the multimodal auto class."""
    return wrapper(name, "AutoModelForMultimodalLM", **overrides)


TINY_TOKENIZER = {"num_filters": 2, "depths": [1, 1], "downsampling_ratios": [2]}

SPEECH_CASES: list[Case] = [
    speech("fun_asr_nano", adaptor_config={"hidden_size": 48}),
    speech("glmasr"),
    speech("granite_speech"),
    speech("granite_speech_plus"),
    speech("kyutai_speech_to_text"),
    speech("nemo_speechlm", text_config=NEMOTRON_TEXT),
    speech("omniasr"),
    speech("qwen2_5_omni", thinker_config={"text_config": MROPE_TEXT}),
    speech("qwen2_audio"),
    speech("qwen3_asr"),
    speech("qwen3_omni_moe"),
    speech(
        "vibevoice_asr",
        semantic_tokenizer_encoder_config=TINY_TOKENIZER,
        acoustic_tokenizer_encoder_config=TINY_TOKENIZER,
    ),
    speech("voxtral"),
    speech("voxtral_realtime"),
    wrapper("audioflamingo3", "AudioFlamingo3ForConditionalGeneration"),
    wrapper("musicflamingo", "MusicFlamingoForConditionalGeneration"),
    wrapper("vibevoice", "VibeVoiceForConditionalGeneration"),
    wrapper("higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration"),
    wrapper("csm", "CsmForConditionalGeneration"),
    wrapper("glm_image", "GlmImageForConditionalGeneration"),
    wrapper("evolla", "EvollaForProteinText2Text"),
    text("phi4_multimodal"),
    text("moshi"),
    text("moss_transcribe_diarize"),
    text("fuyu"),
    text("apertus1p5"),
    text("dots3_note"),
    text("blt"),
    wrapper("emu3_text_model", "Emu3ForCausalLM"),
    wrapper("kosmos_2_text_model", "Kosmos2TextForCausalLM"),
    wrapper("kosmos_2_5_text_model", "Kosmos2_5TextForCausalLM"),
    wrapper("mllama_text_model", "MllamaForCausalLM"),
]
