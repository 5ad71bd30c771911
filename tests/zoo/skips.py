"""Model types of transformers' config mapping that the zoo leaves out, each with its reason."""

from __future__ import annotations

from tests.zoo.parts import PARTS

ENCODER_DECODER = "an encoder-decoder"
DORMANT_DECODER = "a bidirectional text encoder: its causal class is the same encoder unless is_decoder is set"
NO_SOFTMAX = "a state-space or recurrent model: no softmax attention"

# reason: model types
GROUPS = {
    "an image, video or document-image model: no text decoder": """
        aimv2_vision_model beit bit chmv2 conditional_detr convnext convnextv2 cvt d_fine dab-detr data2vec-vision
        deformable_detr deimv2 deit depth_anything depth_pro detr dinat dinov2 dinov2_with_registers dinov3_convnext
        dinov3_vit donut-swin dpt edgetam edgetam_video efficientloftr efficientnet eomt eomt_dinov3 focalnet glpn
        grounding-dino hgnet_v2 hiera ijepa levit lightglue lw_detr lw_detr_vit mask2former maskformer
        maskformer-swin mgp-str mlcd mlcd_vision_model mm-grounding-dino mobilenet_v1 mobilenet_v2 mobilevit
        mobilevitv2 omdet-turbo oneformer owlv2 owlvit perceiver pixio poolformer pp_doclayout_v2 pp_doclayout_v3
        pp_doclayout_v4 pp_lcnet pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_det
        pp_ocrv5_server_rec pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec
        prompt_depth_anything pvt pvt_v2 regnet resnet rf_detr rf_detr_dinov2 rt_detr rt_detr_resnet rt_detr_v2 sam
        sam2 sam2_video sam3 sam3_lite_text sam3_tracker sam3_tracker_video sam3_video sam_hq sapiens2 segformer
        seggpt slanet slanext superglue superpoint swiftformer swin swin2sr swinv2 table-transformer textnet
        timesformer timm_backbone timm_wrapper tipsv2_dpt tipsv2_vision_model tvp upernet uvdoc uvdoc_backbone
        videomae videomt videoprism_vision_model vit vit_mae vit_msn vitdet vitmatte vitpose vitpose_backbone vivit
        vjepa2 yolos zoedepth
    """,
    "the image part of a model without a causal text decoder": """
        align_vision_model altclip_vision_model bridgetower_vision_model chinese_clip_vision_model
        clipseg_vision_model edgetam_mask_decoder edgetam_prompt_encoder edgetam_video_mask_decoder
        edgetam_video_prompt_encoder edgetam_vision_model flava_image_codebook flava_image_model florence_vision
        groupvit_vision_model metaclip_2_vision_model owlv2_vision_model owlvit_vision_model pix2struct_vision_model
        pp_formulanet_vision sam2_hiera_det_model sam2_mask_decoder sam2_prompt_encoder sam2_video_mask_decoder
        sam2_video_prompt_encoder sam2_vision_model sam3_detr_decoder sam3_detr_encoder sam3_geometry_encoder
        sam3_lite_text_detr_decoder sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder
        sam3_lite_text_mask_decoder sam3_lite_text_text_model sam3_mask_decoder sam3_tracker_mask_decoder
        sam3_tracker_prompt_encoder sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder
        sam3_vision_model sam3_vit_model sam_hq_mask_decoder sam_hq_prompt_encoder sam_hq_vision_model
        sam_mask_decoder sam_prompt_encoder sapiens2_head slanext_vision xclip_vision_model
    """,
    "a bidirectional text encoder: no causal language model class": """
        albert bros canine convbert deberta deberta-v2 distilbert dpr eurobert fnet funnel gte ibert
        jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3 layoutxlm lilt longformer luke markuplm mobilebert
        modernbert mpnet mra neomme nomic_bert nystromformer openai_privacy_filter splinter squeezebert tapas
        ultrabert yoso
    """,
    DORMANT_DECODER: """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """,
    "a protein encoder or structure model: no text": """
        esm esmc esmfold2
    """,
    "an encoder of images and text together: no causal decoder": """
        bridgetower flava flava_multimodal_model lxmert modernvbert ultravbert vilt visual_bert
    """,
    "a contrastive model of two encoders: no decoder": """
        aimv2 align altclip chinese_clip clap clip clipseg groupvit metaclip_2 pe_audio pe_audio_video pe_video
        siglip siglip2 tipsv2 videoprism vision-text-dual-encoder xclip
    """,
    "the text encoder of a contrastive, detection or segmentation model: no language model head": """
        aimv2_text_model align_text_model altclip_text_model bridgetower_text_model chinese_clip_text_model
        clap_text_model clip_text_model clipseg_text_model flava_text_model groupvit_text_model
        metaclip_2_text_model owlv2_text_model owlvit_text_model siglip2_text_model siglip_text_model
        tipsv2_text_model videoprism_text_model xclip_text_model
    """,
    "an embedding or retrieval model: no causal language model head": """
        colmodernvbert colpali colqwen2 embedding_gemma2 embedding_gemma2_text
    """,
    "an audio encoder, codec, vocoder or transducer: no text decoder": """
        audio-spectrogram-transformer clap_audio_model clvp_encoder dac data2vec-audio encodec
        fastspeech2_conformer_hifigan granite_speech5_ctc granite_speech5_encoder higgs_audio_v2_tokenizer hubert
        lasr_ctc lasr_encoder mimi_decoder mimi_encoder moonshine_streaming_encoder nemotron_asr_streaming_encoder
        neucodec omniasr_ctc parakeet_ctc pe_audio_encoder pe_audio_video_encoder pe_video_encoder
        pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder sew sew-d
        speecht5_hifigan unispeech unispeech-sat univnet vibevoice_acoustic_tokenizer_decoder wav2vec2 wav2vec2-bert
        wav2vec2-conformer wavlm wavtokenizer xcodec xcodec2
    """,
    "a speech or music generator: its decoder emits audio codes, latents or waveforms, not text": """
        bark clvp clvp_decoder fastspeech2_conformer_with_hifigan gradium_phonon_tts musicgen_decoder
        musicgen_melody_decoder pocket_tts vits
    """,
    "a forecaster of time series: no text": """
        patchtsmixer patchtst timesfm timesfm2_5
    """,
    ENCODER_DECODER: """
        autoformer bart bigbird_pegasus blenderbot blenderbot-small canary canary_decoder cohere_asr dia dia_decoder
        encoder-decoder fastspeech2_conformer florence2 fsmt informer led longt5 m2m_100 marian mbart moonshine
        moonshine_streaming mt5 musicgen musicgen_melody mvp nemotron3_5_asr nemotron_asr_streaming nllb-moe
        parakeet_rnnt parakeet_tdt pegasus pegasus_x pix2struct plbart pop2piano pp_formulanet pp_formulanet_text
        prophetnet rag seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5
        switch_transformers t5 t5gemma t5gemma2 time_series_transformer udop umt5 vision-encoder-decoder whisper
    """,
    "a part of an encoder-decoder": """
        dia_encoder nougat pix2struct_text_model t5_gemma_module t5gemma2_decoder t5gemma2_encoder t5gemma2_text
    """,
    NO_SOFTMAX: """
        falcon_mamba mamba mamba2 rwkv xlstm
    """,
}

SINGLE = {
    "EvollaModel": "another key of the config class of evolla",
    "decision_transformer": "a policy over returns, states and actions: no text",
    "diffusion_gemma": "a block-diffusion model: its decoder attends both ways over a canvas",
    "diffusion_gemma_text": "the text part of diffusion_gemma, a block-diffusion model",
    "gemma4_assistant": "a drafting head with queries only: it attends to the keys of another model",
    "gemma4_unified_assistant": "a drafting head with queries only: it attends to the keys of another model",
    "imagegpt": "a decoder over image colours: no text",
    "jev": "a decision head on qwen3_5_text: no language model head",
    "muse_glimmer_assistant": "a drafting head that denoises blocks on the hidden states of another model",
    "pi0": "a robot policy: an action expert beside paligemma, no language model head",
    "reformer": "local and hashed attention only: no layer computes a full softmax over the context",
    "flaubert": "a bidirectional text encoder by default (causal=False)",
    "xlm": "a bidirectional text encoder by default (causal=False)",
    "xlnet": "a permutation language model: two-stream relative attention, bidirectional by default",
}

SKIPS: dict[str, str] = {
    **{name: f"built inside the zoo's {case}" for case, names in PARTS.items() for name in names.split()},
    **{name: reason for reason, names in GROUPS.items() for name in names.split()},
    **SINGLE,
}
