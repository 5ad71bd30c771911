"""What each model type does when its config (often an older or hand-written one) lists no kinds of layers.

One entry a model type, read off the config classes of transformers 5.24; the tests derive the same kinds with those
classes. `i` is the layer index from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from routeguard.routes.config import NUM_LAYERS, Config, first

Pattern = Callable[[Config], Sequence[str]]
LabelFix = Callable[[Config, list[str]], list[str]]


def _layers(config: Config) -> range:
    count = first(config, NUM_LAYERS)
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            f"the config of {config.get('model_type')!r} names no number of layers ({', '.join(NUM_LAYERS)})"
        )
    return range(count)


def _all(kind: str) -> Pattern:
    return lambda config: [kind] * len(_layers(config))


def _every(default: int, rest: str, *, key: str = "", kind: str = "full", last: bool = False) -> Pattern:
    """Layers with `(i + 1) % period == 0` (and the last, if `last`) are `kind`; the config's `key` sets the period."""

    def pattern(config: Config) -> list[str]:
        period = _period(config.get(key) if key else None, default)
        layers = _layers(config)
        return [kind if (i + 1) % period == 0 or (last and i == layers[-1]) else rest for i in layers]

    return pattern


def _remainder(period: int, remainder: int, rest: str) -> Pattern:
    return lambda config: ["full" if i % period == remainder else rest for i in _layers(config)]


def _period(value: Any, default: int) -> int:
    return len(value) if isinstance(value, str) else int(value or default)  # "LLLG" means 4


def _listed(key: str, *, default: str, rest: str = "other", kind: str = "full") -> Pattern:
    """The config's `key` lists the indices of the `kind` layers; without it all layers are `default`."""

    def pattern(config: Config) -> list[str]:
        indices = config.get(key)
        return [default if indices is None else kind if i in indices else rest for i in _layers(config)]

    return pattern


def _by_window_flag(max_window_layers: int, *, flag: bool = True, window: int | None = 4096) -> Pattern:
    """The first `max_window_layers` layers are full, the others windowed, if windows are on (qwen2 and its kin)."""

    def pattern(config: Config) -> list[str]:
        on = config.get("sliding_window", window) is not None and (not flag or bool(config.get("use_sliding_window")))
        full = int(config.get("max_window_layers", max_window_layers))
        return ["sliding" if on and i >= full else "full" for i in _layers(config)]

    return pattern


def _qwen2_moe(config: Config) -> list[str]:
    windowed = range(0, int(config.get("max_window_layers", 28)) if config.get("use_sliding_window") else 0, 2)
    return ["sliding" if i in windowed else "full" for i in _layers(config)]


def _exaone4(config: Config) -> Sequence[str]:
    if config.get("sliding_window", 4096) is None:
        return _all("full")(config)
    return _every(4, "sliding", key="sliding_window_pattern")(config)


def _cohere2_moe(config: Config) -> list[str]:
    num_dense = int(config.get("first_k_dense_replace") or 0)
    dense, rest = (
        int(config.get("prefix_dense_sliding_window_pattern", 1)),
        int(config.get("sliding_window_pattern", 4)),
    )
    steps = [(i + 1, dense) if i < num_dense else (i - num_dense + 1, rest) for i in _layers(config)]
    return ["sliding" if position % period else "full" for position, period in steps]


def rotates(config: Config, layer: int) -> bool:
    """`no_rope_layers[i]` is 1 where layer i does rotate; by default all but every 4th (`no_rope_layer_interval`)."""
    listed = config.get("no_rope_layers")
    return bool(listed[layer]) if listed else (layer + 1) % int(config.get("no_rope_layer_interval") or 4) != 0


def _smollm3(config: Config) -> list[str]:
    windows = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return ["sliding" if windows and not rotates(config, i) else "full" for i in _layers(config)]


def _llama4(config: Config) -> list[str]:
    chunks = config.get("attention_chunk_size", 8192) is not None
    return ["chunked" if chunks and rotates(config, i) else "full" for i in _layers(config)]


def _kimi_linear(config: Config) -> list[str]:
    listed = (config.get("linear_attn_config") or {}).get("full_attn_layers")
    full = {i - 1 for i in listed} if listed is not None else {i for i in _layers(config) if i and i % 4 == 0}
    return ["full" if i in full else "other" for i in _layers(config)]


def _jamba(config: Config) -> list[str]:
    period, offset = int(config.get("attn_layer_period", 8)), int(config.get("attn_layer_offset", 4))
    return ["full" if i % period == offset else "other" for i in _layers(config)]


def _zamba(config: Config) -> list[str]:
    period, offset = int(config.get("attn_layer_period", 6)), int(config.get("attn_layer_offset", 4))
    return ["full" if i == 2 or (i >= 3 and (i - 3) % period == offset) else "other" for i in _layers(config)]


def _zamba2(config: Config) -> list[str]:
    kinds = ["other", *(["other"] * 5 + ["full"]) * 7, *["other"] * 4, "full", *["other"] * 3, "full", *["other"] * 2]
    if len(kinds) != len(_layers(config)):
        raise ValueError(
            f"zamba2's built-in layout has {len(kinds)} layers, not {len(_layers(config))}; list layers_block_type"
        )
    return kinds


def _olmo_hybrid(config: Config) -> list[str]:
    kinds = list(_every(4, "other")(config))
    return kinds if "full" in kinds else [*kinds[:-1], "full"]


def _recurrent_gemma(config: Config) -> list[str]:
    period = list(config.get("block_types") or ("recurrent", "recurrent", "attention"))
    return ["sliding" if period[i % len(period)] == "attention" else "other" for i in _layers(config)]


def _deepseek_v4(config: Config) -> list[str]:
    rates = config.get("compress_ratios")
    return ["sliding" if rates and rates[i] == 0 else "sparse" for i in _layers(config)]


def _dots3_note(config: Config) -> list[str]:
    full = "full" if config.get("use_dsa") is False else "sparse"
    windows = config.get("use_sliding_window", True)
    return [full if not windows or i < 2 or i % 4 == 1 else "sliding" for i in _layers(config)]


def _minimax_m3(config: Config) -> list[str]:
    frequencies = (config.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    return ["sparse" if frequencies and frequencies[i] else "full" for i in _layers(config)]


def _flint(config: Config) -> list[str]:
    layers = _layers(config)
    return ["full" if i < 2 or i % 4 == 1 or i == layers[-1] else "sliding" for i in layers]


def _lfm3(config: Config) -> list[str]:
    return ["full" if i % 4 == 2 else "sliding" if i and i % 4 == 0 else "other" for i in _layers(config)]


def _inkling(config: Config) -> Sequence[str]:
    if config.get("local_layer_ids") is not None:
        return _listed("local_layer_ids", default="full", rest="full", kind="sliding")(config)
    return _every(6, "sliding")(config)


def _ministral(config: Config) -> Sequence[str]:
    return _all("full" if config.get("sliding_window", 4096) is None else "sliding")(config)


def _lara_mini(config: Config) -> list[str]:
    return [("other", "sliding", "other", "full", "sliding")[i % 5] for i in _layers(config)]


def _mimo(config: Config) -> list[str]:
    return ["full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in _layers(config)]


def _muse(config: Config) -> list[str]:
    layers = _layers(config)
    return ["full" if (layers[-1] - i) % 4 == 0 else "sliding" for i in layers]


PATTERNS: dict[str, Pattern] = {
    # full and windowed softmax layers
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), _every(2, "sliding")),
    **dict.fromkeys(("gemma3", "gemma3_text"), _every(6, "sliding", key="sliding_window_pattern")),
    "gemma3n_text": _every(5, "sliding"),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "beam"), _every(6, "sliding", last=True)
    ),
    "embedding_gemma2_text": _every(6, "sliding", key="sliding_window_pattern", last=True),
    "cohere2": _every(4, "sliding", key="sliding_window_pattern"),
    "cohere2_moe": _cohere2_moe,
    **dict.fromkeys(("exaone4", "exaone_moe"), _exaone4),
    "afmoe": _every(4, "sliding", key="global_attn_every_n_layers"),
    **dict.fromkeys(("olmo3", "dory"), _every(4, "sliding")),
    "kolibri1": _every(5, "sliding"),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), _remainder(4, 0, "sliding")),
    "modernbert-decoder": lambda config: [
        "sliding" if i % int(config.get("global_attn_every_n_layers", 3)) else "full" for i in _layers(config)
    ],
    "flint": _flint,
    "mimo_v2_flash": _mimo,
    "ministral": _ministral,
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _inkling),
    **dict.fromkeys(("muse_glimmer_text", "muse_spark_text"), _muse),
    **dict.fromkeys(("qwen2", "qwen3", "deepseek_ocr2_encoder", "qwen2_5_omni_talker"), _by_window_flag(28)),
    "qwen2_5_omni_text": _by_window_flag(28, window=32768),
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _by_window_flag(80)),
    "dots1": _by_window_flag(62, flag=False),
    "qwen2_moe": _qwen2_moe,
    "smollm3": _smollm3,
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(
        (
            "mellum", "laguna", "zaya", "step3p5", "cohere_compass_text", "falcon_h1", "unlimited_ocr_text", "moshi",
            "kyutai_speech_to_text",
        ),
        _all("full"),
    ),
    "gpt_neo": lambda config: ["sliding" if i % 2 else "full" for i in _layers(config)],
    "muse_glimmer_assistant": _all("sliding"),
    # sparse layers
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "hy_v4_vl_text", "mistral_large4_text"), _all("sparse")
    ),
    "deepseek_v4": _deepseek_v4,
    "dots3_note_text": _dots3_note,
    "minimax_m3_vl_text": _minimax_m3,
    # softmax layers among linear attention, state space or convolution layers
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _every(4, "other", key="full_attention_interval")
    ),
    "qwen4_exp_text": _every(4, "other", key="full_attention_interval", kind="sparse"),
    "olmo_hybrid": _olmo_hybrid,
    "glm5_next_text": _every(4, "other", kind="sparse"),
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _every(6, "other", key="layer_group_size"),
    "minimax": lambda config: ["other" if i % 2 else "full" for i in _layers(config)],
    "lara_mini": _lara_mini,
    "bamba": _listed("attn_layer_indices", default="other"),
    "lfm2": _listed("full_attn_idxs", default="full"),
    "lfm3": _lfm3,
    "jamba": _jamba,
    "zamba": _zamba,
    "zamba2": _zamba2,
    "nemotron_h": lambda config: ["other", "other", "full", "other"],
    "recurrent_gemma": _recurrent_gemma,
    **dict.fromkeys(("granitemoehybrid", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _all("other")),
}  # fmt: skip


def _indexed(config: Config, labels: list[str]) -> list[str]:
    return ["indexed_attention" if label == "full_attention" else label for label in labels]


def _dsa_switch(config: Config, labels: list[str]) -> list[str]:
    if config.get("use_dsa") is None:
        return labels
    full, other = (
        ("indexed_attention", "full_attention") if config["use_dsa"] else ("full_attention", "indexed_attention")
    )
    return [full if label == other else label for label in labels]


def _trimmed(config: Config, labels: list[str]) -> list[str]:
    """Extra labels at the end belong to multi-token-prediction layers."""
    return labels[: len(_layers(config))]


# Model types whose config class rewrites the labels that it is given.
LABEL_FIXES: dict[str, LabelFix] = {
    "dory": lambda config, labels: labels[::2] if "mlp" in labels else labels,
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "embedding_gemma2_text"),
        lambda config, labels: [*labels[:-1], "full_attention"],
    ),
    **dict.fromkeys(("glm5_next_text", "qwen4_exp_text"), _indexed),
    "dots3_note_text": _dsa_switch,
    **dict.fromkeys(("step3p5", "deepseek_v4"), _trimmed),
}
