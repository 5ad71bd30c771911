"""Which decoder layers attend to the whole context, read from the config alone.

Every layer gets one kind: "full", "sparse" (global, but only to what a top-k indexer or a compression keeps),
"sliding", "chunked", or "other" (linear attention, SSM, convolution, cross-attention, feed-forward only).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from routeguard.routes.block import UnknownLayoutError
from routeguard.routes.config import NUM_LAYERS, Config, first
from routeguard.routes.layer_patterns import LABEL_FIXES, PATTERNS
from routeguard.routes.windows import window_on_all

LONG_RANGE = ("full", "sparse")

# Labels as they stand in `layer_types` and its older forms. A label that is not here is refused.
_LABELS = {
    "full": (
        "full_attention", "attention", "attn", "full", "global", "global_attention", "hybrid", "*",
        "reference_sliding_attention",  # unlimited_ocr: only tokens generated later are windowed
    ),
    "sparse": (
        "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse",
        "compressed_sparse_attention", "heavily_compressed_attention",
    ),
    "sliding": (
        "sliding_attention", "hybrid_sliding", "swa", "sliding_window", "local", "local_attention", "window_attention",
    ),
    "chunked": ("chunked_attention",),
    "other": (
        "linear_attention", "mamba", "mamba2", "linear", "kda", "gdn", "jet", "lightning", "lightning_attention",
        "lightning-attn", "gated_deltanet", "recurrent", "conv", "short_conv", "moe", "mlp", "dense", "M", "-", "E",
    ),
}  # fmt: skip
KIND_OF_LABEL = {label: kind for kind, labels in _LABELS.items() for label in labels}

_LIST_KEYS = ("layer_types", "layers_block_type", "mixer_types", "attention_layers")
_UNREAD_HINTS = (
    "sliding_window", "sliding_window_pattern", "sliding_window_size", "attention_chunk_size", "local_layer_ratio",
    "attention_window_size", "window_size", "local_attention", "global_attn_every_n_layers", "attn_type_list",
    "local_attention_layers", "hybrid_layer_pattern", "sparse_attention_config", "block_types",
)  # fmt: skip


def layer_kinds(config: Config) -> tuple[str, ...]:
    """The kind of each decoder layer of a text config, by the first source that the config has.

    Order: an explicit list of labels; what the model type does without one (`layer_patterns.PATTERNS`); the generic
    ways of naming attention layers. Without any of them every layer is full, unless the config mentions windows or
    patterns that are not understood. Raises ValueError for those, and for a label or a count that is not understood.
    """
    model_type = str(config.get("model_type", ""))
    labels = _explicit_labels(config)
    if labels is not None:
        fixed = LABEL_FIXES[model_type](config, labels) if model_type in LABEL_FIXES else labels
        _check_count(config, labels, fixed)
        labels = fixed
        kinds: Sequence[str] = [_kind(label) for label in labels]
    else:
        kinds = _unlisted_kinds(config, model_type)
    if window_on_all(config, listed=labels is not None):
        kinds = ["sliding" if kind == "full" else kind for kind in kinds]
    cross = set(config.get("cross_attention_layers") or ())
    return tuple("other" if i in cross else kind for i, kind in enumerate(kinds))


def kinds_are_stated(config: Config) -> bool:
    """Whether the config itself says which layers attend fully, rather than nothing at all."""
    labels = _explicit_labels(config)
    return labels is not None or _attention_indices(config, first(config, NUM_LAYERS, 0)) is not None


def count_layers(config: Config) -> int:
    """Number of decoder layers. Raises ValueError if the config names none."""
    count = first(config, NUM_LAYERS)
    if not isinstance(count, int) or count < 1:
        raise ValueError(
            f"the config of model type {config.get('model_type')!r} names no number of decoder layers "
            f"(looked for {', '.join(NUM_LAYERS)})"
        )
    return count


def _explicit_labels(config: Config) -> list[str] | None:
    for key in _LIST_KEYS:
        value = config.get(key)
        if isinstance(value, (list, tuple)) and value and all(isinstance(label, str) for label in value):
            return list(value)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return list(pattern)
    types = config.get("attention_types")  # gpt_neo: [[["global", "local"], 12]]
    if isinstance(types, (list, tuple)) and types:
        return [label for labels, repeats in types for _ in range(repeats) for label in labels]
    return None


def _check_count(config: Config, labels: list[str], fixed: list[str]) -> None:
    count = first(config, NUM_LAYERS)
    if isinstance(count, int) and count not in (len(labels), len(fixed)) and config.get("model_type") != "nemotron_h":
        raise ValueError(  # nemotron_h's count is deprecated and may be stale
            f"the config lists {len(labels)} layer kinds for num_hidden_layers={count}; "
            "one of the two is wrong, and guessing would protect the wrong layers"
        )


def _kind(label: str) -> str:
    if label not in KIND_OF_LABEL:
        raise UnknownLayoutError(f"layer kind {label!r} is not known; known kinds: {', '.join(sorted(KIND_OF_LABEL))}")
    return KIND_OF_LABEL[label]


def _unlisted_kinds(config: Config, model_type: str) -> Sequence[str]:
    """Kinds for a config without a list of labels."""
    if model_type in PATTERNS:
        return PATTERNS[model_type](config)
    num_layers = count_layers(config)
    indices = _attention_indices(config, num_layers)
    if indices is not None:
        return ["full" if i in indices else "other" for i in range(num_layers)]
    _refuse_unread_windows(config, model_type)
    return ["full"] * num_layers


def _attention_indices(config: Config, num_layers: int) -> set[int] | None:
    """The attention layers among others, as hybrids outside transformers name them."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("full_attn_layers") is not None:
        return {i - 1 for i in linear["full_attn_layers"]}  # 1-indexed
    for key in ("attn_layer_indices", "full_attn_idxs", "attn_layer_ids", "full_attn_layers"):
        if isinstance(config.get(key), Iterable):
            return set(config[key])
    if config.get("attn_layer_period") is not None:
        period, offset = config["attn_layer_period"], config.get("attn_layer_offset", 0)
        return {i for i in range(num_layers) if i % period == offset}
    interval = first(config, ("full_attention_interval", "layer_group_size"))
    if interval is not None:
        return {i for i in range(num_layers) if (i + 1) % interval == 0}
    return None


def _refuse_unread_windows(config: Config, model_type: str) -> None:
    if window_on_all(config, listed=False) is not None:
        return  # a model type whose window this table reads
    found = {key: value for key in _UNREAD_HINTS for value in [config.get(key)] if _says_something(value)}
    if config.get("use_sliding_window") is False:
        found = {key: value for key, value in found.items() if not key.startswith("sliding_window")}
    if found:
        stated = ", ".join(f"{key}={value!r}" for key, value in found.items())
        raise UnknownLayoutError(
            f"the config of model type {model_type!r} has no layer_types, and {stated} may narrow some "
            "layers in a way that this version does not know; save the model once with transformers 5 (it writes "
            "layer_types), or register a row with `kinds` (routeguard.register_architecture)"
        )


def _says_something(value: Any) -> bool:
    return value is not None and value is not False and value != 0 and value != [] and value != {} and value != -1
