"""What gives query and key weights their meaning: where these facts differ, the same weights mean something else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from routeguard.routes.collection import AttentionLayer, Routes
from routeguard.routes.config import rope_parameters, text_config

if TYPE_CHECKING:
    from torch import nn

# Config fields that change the logits although no weight changes, under the names that configs give them.
_CONFIG_FACTS = (
    "sliding_window", "attn_logit_softcapping", "attn_logits_soft_cap", "attn_logits_scaling", "query_pre_attn_scalar",
    "attention_multiplier", "attn_scale", "softmax_scale", "attn_temperature_tuning", "floor_scale",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "alibi", "clip_qkv", "use_qk_norm", "qk_layernorm",
    "attention_chunk_size", "no_rope_layers", "position_embedding_type", "rope_interleave",
)  # fmt: skip
_GEOMETRY_FACTS = (
    "num_heads", "num_key_value_heads", "head_dim", "rotary_dim", "rotary_offset", "rotary_pairing", "qk_norm",
)  # fmt: skip
# Keys of the rotary settings that say nothing about the angles of text positions, or that `rotary_dim` says already.
_ROPE_IGNORED = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")


def meaning_of_config(config: Mapping[str, Any], routes: Routes | None = None) -> dict[str, Any]:
    """The facts as JSON values, from a config as a plain dict and, where known, the geometry that `find_routes` read.

    Args:
        config: `config.json` as a dict (multimodal wrappers: the text decoder's section is used).
        routes: routes of the same model; they add head counts, widths, rotary dimensions, QK-norm and layer kinds.
    """
    text = text_config(config)
    if isinstance(text.get("attn_config"), Mapping):
        text = {**text["attn_config"], **text}
    facts: dict[str, Any] = {name: text[name] for name in _CONFIG_FACTS if name in text}
    if text.get("use_sliding_window") is False:
        facts["sliding_window"] = None
    facts |= _rope_facts(text)
    if routes is not None:
        facts["layer_kinds"] = list(routes.layer_kinds)
        facts |= {name: _by_layer(routes.attention, name) for name in _GEOMETRY_FACTS}
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def meaning_of(model: nn.Module) -> dict[str, Any]:
    """The facts of a model in memory, wrapped or not; empty for a module without a Hugging Face config.

    Without geometry for a class that the table of architectures does not know.
    """
    from routeguard.routes.in_memory import model_config, model_tensors
    from routeguard.routes.resolve import resolve

    try:
        config = model_config(model)
    except ValueError:
        return {}
    try:
        routes = resolve(config, model_tensors(model))
    except ValueError:  # found by the probe: the config still says most of it
        return meaning_of_config(config)
    return meaning_of_config(config, routes)


def check_same_meaning(
    tuned: Mapping[str, Any], reference: Mapping[str, Any], *, insist: bool = False
) -> tuple[str, ...]:
    """Compare the facts of two models. Returns notes for the report (what could not be compared, what was insisted on).

    Args:
        tuned, reference: facts as `meaning_of` gives them; empty means unknown.
        insist: go on although facts differ. Default: no.

    Raises:
        ValueError: facts differ and `insist` is False; the message lists each with both values.
    """
    if not tuned or not reference:
        side = "reference" if not reference else "model"
        return (f"the {side} carries no config: rotary settings, head widths and the like were not compared",)
    differing = [
        f"{name}: {_show(tuned[name])} in the model, {_show(reference[name])} in the reference"
        for name in tuned
        if name in reference and tuned[name] != reference[name]
    ]
    if differing and not insist:
        raise ValueError(
            "the model and the reference differ in what gives queries and keys their meaning, so weights of the one do "
            "not fit the other:\n  "
            + "\n  ".join(differing)
            + "\nUse a reference from the same model, or insist (insist=True, --insist) if you know that the "
            "difference is harmless"
        )
    notes = [f"insisted on although they differ: {'; '.join(differing)}"] if differing else []
    unknown = sorted(name for name in set(tuned) ^ set(reference) if (tuned.get(name) or reference.get(name)))
    if unknown:
        notes.append(f"known of one side only, not compared: {', '.join(unknown)}")
    return tuple(notes)


def _rope_facts(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings, one fact for each kind of layer that has its own."""
    nested = text.get("rope_parameters")
    kinds = (
        [kind for kind, value in nested.items() if isinstance(value, Mapping)] if isinstance(nested, Mapping) else []
    )
    settings = {f"rope ({kind})": rope_parameters(text, kind) for kind in kinds} or {"rope": rope_parameters(text)}
    facts: dict[str, Any] = {}
    for name, values in settings.items():
        kind = values.get("rope_type") or values.get("type") or "default"
        kept = {k: _number(v) for k, v in values.items() if v is not None and k not in _ROPE_IGNORED}
        if kept:
            facts[name] = {**kept, "rope_type": "default" if kind == "mrope" else kind}
    if "rope_local_base_freq" in text:
        facts["rope_local_base_freq"] = text["rope_local_base_freq"]
    return facts


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _by_layer(attention: Iterable[AttentionLayer], name: str) -> Any:
    """One value if all layers agree, else layer index (as text) to value."""
    values = {str(layer.layer): getattr(layer, name) for layer in attention}
    distinct = list(dict.fromkeys(values.values()))
    return distinct[0] if len(distinct) == 1 else values


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
