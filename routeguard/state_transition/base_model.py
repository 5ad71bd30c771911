"""What a conversion asks of the base model, and tells it."""

from __future__ import annotations

from typing import Any

from torch import nn


def named_part(model: Any, getter: str) -> nn.Module:
    """What a method like `get_decoder` of the model gives; ValueError where it has none."""
    get = getattr(model, getter, None)
    part = get() if callable(get) else None
    if not isinstance(part, nn.Module):
        raise ValueError(f"{type(model).__name__} does not name its {getter.removeprefix('get_')}: not supported")
    return part


def per_layer_embeddings(decoder: nn.Module) -> list[nn.Module]:
    """Further embeddings of the same tokens, one for every layer (Gemma 3n and 4)."""
    found = getattr(decoder, "embed_tokens_per_layer", None)
    return [found] if isinstance(found, nn.Module) else []


def refuse_mixed_caches(model: Any, layers: list[int]) -> None:
    """Layers that keep more than keys and values (attention beside a state-space model) cannot forget steps."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    kept = DynamicCache(config=model.config).layers
    mixed = {layer: type(kept[layer]).__name__ for layer in layers if type(kept[layer]) is not DynamicLayer}
    if mixed:
        raise ValueError(
            f"layers {sorted(mixed)} cannot get a linear path: they keep more than keys and values while text is "
            f"generated ({', '.join(sorted(set(mixed.values())))}); choose others with layers="
        )


def text_config(model: Any) -> Any:
    """The configuration of the decoder, which a multimodal one holds within."""
    get = getattr(model.config, "get_text_config", None)
    return get() if callable(get) else model.config


def set_vocabulary(model: Any, size: int) -> list[tuple[Any, int]]:
    """Tell the model's loss how many columns its logits have; returns what was there."""
    owners = [text_config(model), *([model] if isinstance(getattr(model, "vocab_size", None), int) else [])]
    before = [(owner, int(owner.vocab_size)) for owner in owners]
    for owner in owners:
        owner.vocab_size = max(size, int(owner.vocab_size))
    return before
