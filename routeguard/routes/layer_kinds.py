"""Which decoder layers attend to the whole context, read from the config alone.

Every layer gets one kind: "full", "sparse" (global, through a top-k indexer), "sliding", "chunked", or "other"
(linear attention, SSM, convolution, feed-forward only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from routeguard.routes.config import NUM_LAYERS, Config, first

LONG_RANGE = ("full", "sparse")

# Labels as they stand in `layer_types` and its older forms. A label that is not here is refused.
_LABELS = {
    "full": ("full_attention", "attention", "attn", "full", "global", "global_attention", "hybrid", "*"),
    "sparse": (
        "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse",
        "compressed_sparse_attention", "heavily_compressed_attention",
    ),
    "sliding": (
        "sliding_attention", "hybrid_sliding", "swa", "sliding_window", "local", "local_attention", "window_attention",
        "reference_sliding_attention",
    ),
    "chunked": ("chunked_attention",),
    "other": (
        "linear_attention", "mamba", "mamba2", "linear", "kda", "gdn", "jet", "lightning", "lightning_attention",
        "lightning-attn", "gated_deltanet", "recurrent", "conv", "short_conv", "moe", "mlp", "dense", "M", "-", "E",
    ),
}  # fmt: skip
KIND_OF_LABEL = {label: kind for kind, labels in _LABELS.items() for label in labels}

_LIST_KEYS = ("layer_types", "layers_block_type", "mixer_types", "block_types", "_block_types", "attention_layers")


def layer_kinds(config: Config) -> tuple[str, ...]:
    """The kind of each decoder layer of a text config, by the first source that the config has.

    Order: an explicit list of labels; the older ways of naming the attention layers; the model type's default;
    `sliding_window`; else full attention everywhere. Raises ValueError for a label or count that is not understood.
    """
    num_layers = first(config, NUM_LAYERS)
    labels = _explicit_labels(config)
    if labels is not None:
        num_layers = _check_count(config, labels, num_layers)
        kinds = tuple(_kind(label) for label in labels)
    elif not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(
            f"the config of model type {config.get('model_type')!r} names no number of decoder layers "
            f"(looked for {', '.join(NUM_LAYERS)})"
        )
    else:
        kinds = _default_kinds(config, num_layers)
    return _apply_windows(config, kinds)


def _explicit_labels(config: Config) -> list[str] | None:
    for key in _LIST_KEYS:
        value = config.get(key)
        if isinstance(value, (list, tuple)) and value and all(isinstance(label, str) for label in value):
            return _cycle(config, key, list(value))
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return list(pattern.replace("|", ""))
    types = config.get("attention_types")  # gpt_neo: [[["global", "local"], 12]]
    if isinstance(types, (list, tuple)) and types:
        return [label for labels, repeats in types for _ in range(repeats) for label in labels]
    return None


def _cycle(config: Config, key: str, labels: list[str]) -> list[str]:
    """Griffin-style `block_types` give one period of the pattern."""
    num_layers = first(config, NUM_LAYERS)
    if key in ("block_types", "_block_types") and isinstance(num_layers, int):
        labels = [labels[i % len(labels)] for i in range(num_layers)]
        return ["local_attention" if label == "attention" else label for label in labels]
    return labels


def _check_count(config: Config, labels: list[str], num_layers: Any) -> int:
    if isinstance(num_layers, int) and num_layers != len(labels) and config.get("model_type") not in _LABELS_WIN:
        raise ValueError(
            f"the config lists {len(labels)} layer kinds for num_hidden_layers={num_layers}; "
            "one of the two is wrong, and guessing would protect the wrong layers"
        )
    return len(labels)


_LABELS_WIN = ("nemotron_h",)  # its num_hidden_layers is deprecated and may be stale


def _kind(label: str) -> str:
    if label not in KIND_OF_LABEL:
        raise ValueError(f"layer kind {label!r} is not known; known kinds: {', '.join(sorted(KIND_OF_LABEL))}")
    return KIND_OF_LABEL[label]


def _default_kinds(config: Config, num_layers: int) -> tuple[str, ...]:
    """Kinds for configs without a list: named indices, a period, then what the model type does by itself."""
    indices = _attention_indices(config, num_layers)
    if indices is not None:
        rest = "sparse" if str(config.get("model_type", "")).startswith("qwen4_exp") else "full"
        return tuple(rest if i in indices else "other" for i in range(num_layers))
    default = _MODEL_DEFAULTS.get(str(config.get("model_type", "")))
    if default is not None:
        return tuple(default(config, i, num_layers) for i in range(num_layers))
    if config.get("sliding_window_pattern") is not None or config.get("local_layer_ratio") is not None:
        raise ValueError(
            f"model type {config.get('model_type')!r} mixes window and full layers by a pattern that this version does "
            "not know, and its config has no layer_types; save the model once with transformers 5 (it writes them)"
        )
    return ("full",) * num_layers


def _attention_indices(config: Config, num_layers: int) -> set[int] | None:
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("full_attn_layers") is not None:
        return {i - 1 for i in linear["full_attn_layers"]}  # 1-indexed
    for key in ("attn_layer_indices", "full_attn_idxs", "attn_layer_ids", "full_attn_layers"):
        if config.get(key) is not None:
            return set(config[key])
    if config.get("attn_layer_period") is not None:
        period, offset = config["attn_layer_period"], config.get("attn_layer_offset", 0)
        return {i for i in range(num_layers) if i % period == offset}
    interval = first(config, ("full_attention_interval", "layer_group_size"))
    if interval is not None:
        return {i for i in range(num_layers) if (i + 1) % interval == 0}
    return None


def _every(period_of: Callable[[Config], int], rest: str) -> Callable[[Config, int, int], str]:
    return lambda config, i, _: rest if (i + 1) % period_of(config) else "full"


def _pattern(config: Config, default: int) -> int:
    value = config.get("sliding_window_pattern", default)
    return len(value) if isinstance(value, str) else int(value or default)


def _by_window_flag(config: Config, i: int, _: int) -> str:
    """qwen2 and its kin: the first `max_window_layers` layers are full, the others windowed, if windows are on."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return "full"
    return "sliding" if i >= (first(config, ("max_window_layers",), 0)) else "full"


def _smollm3(config: Config, i: int, _: int) -> str:
    """Rotary layers take the window, if windows are on; layers without rotary embedding see everything."""
    rope_layers = config.get("no_rope_layers")
    has_rope = rope_layers[i] if rope_layers else (i + 1) % config.get("no_rope_layer_interval", 4)
    return "sliding" if has_rope and config.get("use_sliding_window") and config.get("sliding_window") else "full"


def _llama4(config: Config, i: int, _: int) -> str:
    rope_layers = config.get("no_rope_layers")
    return "chunked" if (rope_layers[i] if rope_layers else (i + 1) % 4) else "full"


# What a model type does when its config (often an old one) has no list of kinds.
_MODEL_DEFAULTS: dict[str, Callable[[Config, int, int], str]] = {
    **dict.fromkeys(
        ("gemma2", "vaultgemma", "gpt_oss"), lambda config, i, n: "sliding" if i % 2 == 0 else "full"
    ),
    **dict.fromkeys(("gemma3", "gemma3_text"), _every(lambda c: _pattern(c, 6), "sliding")),
    "cohere2": _every(lambda c: _pattern(c, 4), "sliding"),
    **dict.fromkeys(("exaone4", "exaone_moe"), _every(lambda c: _pattern(c, 4), "sliding")),
    **dict.fromkeys(("olmo3", "afmoe"), _every(lambda c: int(c.get("global_attn_every_n_layers", 4)), "sliding")),
    "modernbert-decoder": lambda c, i, n: "full" if i % c.get("global_attn_every_n_layers", 3) == 0 else "sliding",
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
        _every(lambda c: 4, "other"),
    ),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text"), _by_window_flag),
    "smollm3": _smollm3,
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    "minimax": lambda config, i, n: "other" if (i + 1) % 2 == 0 else "full",
    "jamba": lambda config, i, n: "full" if i % 8 == 4 else "other",
    "recurrent_gemma": lambda config, i, n: "sliding" if i % 3 == 2 else "other",
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "bamba"), lambda config, i, n: "other"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), lambda config, i, n: "sparse"),
}

# A set `sliding_window` narrows every layer of these, whatever their label says (read off the modelling code).
_WINDOW_ON_ALL = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "minimax", "moshi", "phi4_multimodal")


def _apply_windows(config: Config, kinds: Sequence[str]) -> tuple[str, ...]:
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and config.get("model_type") in _WINDOW_ON_ALL:
        return tuple("sliding" if kind == "full" else kind for kind in kinds)
    return tuple(kinds)
