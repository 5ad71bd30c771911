"""Read a model's `config.json` as plain data: the text decoder's section, and values under their many names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_DECODER_SECTIONS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model",
    "decoder",
    "global_config",
)
_SECTION_IDENTITY = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "hidden_size",
    "n_embd",
    "d_model",
    "embed_dim",
)

# One line for each quantity: the spellings that configs use, most common first.
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "layers")
NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")


def text_config(config: Config) -> dict[str, Any]:
    """The decoder's section of a (possibly multimodal) config, with the outer model type kept as `outer_model_type`.

    The section wins; what only the outer config says (for example `tie_word_embeddings`) is not mixed in.
    """
    section: dict[str, Any] = dict(config)
    outer = str(config.get("model_type", ""))
    while True:
        inner = next(
            (
                section[name]
                for name in _DECODER_SECTIONS
                if isinstance(section.get(name), Mapping)
                and (any(key in section[name] for key in _SECTION_IDENTITY) or "text_config" in section[name])
            ),
            None,
        )
        if inner is None:
            break
        section = dict(inner)
    section.setdefault("model_type", outer)
    section["outer_model_type"] = outer
    return section


def first(config: Config, names: tuple[str, ...], default: Any = None) -> Any:
    """The first of `names` that the config has with a value other than None."""
    for name in names:
        value = config.get(name)
        if value is not None:
            return value
    return default


def rope_parameters(config: Config, layer_kind: str = "full_attention") -> dict[str, Any]:
    """Rotary settings as one flat dict, whether stored flat, by layer kind, or in the older separate keys."""
    nested = config.get("rope_parameters")
    found: dict[str, Any] = {}
    if isinstance(nested, Mapping):
        chosen = nested.get(layer_kind, nested)
        if isinstance(chosen, Mapping):
            found.update({k: v for k, v in chosen.items() if not isinstance(v, Mapping)})
    legacy = config.get("rope_scaling")
    if isinstance(legacy, Mapping):
        found = {**{k: v for k, v in legacy.items() if not isinstance(v, Mapping)}, **found}
    if "rope_theta" not in found:
        theta = first(config, ("rope_theta", "rotary_emb_base", "rotary_base", "global_rope_theta"))
        if theta is not None:
            found["rope_theta"] = theta
    return found
