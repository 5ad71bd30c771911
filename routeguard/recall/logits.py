"""One forward pass that keeps the last few positions' logits only, for any causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from routeguard.recall.model_config import model_config, without_adapters


def last_logits(model: Any, input_ids: Tensor, keep: int, *, prefill_tokens: int | None = None) -> Tensor:
    """Logits of the last `keep` positions, `[rows, keep, vocabulary]` in float32; no others are ever computed.

    Args:
        model: a causal language model in evaluation mode.
        input_ids: `[rows, tokens]`, all rows of one length, on the model's device.
        keep: how many positions, 1 to `tokens`.
        prefill_tokens: read the rows in pieces of this many tokens through the model's cache. None, and rows no longer
            than a piece: at once.

    Raises ValueError if the model has no output layer that can be narrowed.
    """
    head = input_ids.shape[1] - keep
    if prefill_tokens is None or head < 1 or input_ids.shape[1] <= prefill_tokens:
        return _forward(model, input_ids, keep)
    from transformers import DynamicCache

    cache = DynamicCache(config=model_config(model))
    for start in range(0, head, prefill_tokens):
        _forward(model, input_ids[:, start : min(start + prefill_tokens, head)], 1, cache)
    return _forward(model, input_ids[:, head:], keep, cache)


def _forward(model: Any, input_ids: Tensor, keep: int, cache: Any = None) -> Tensor:
    accepted = inspect.signature(type(without_adapters(model)).forward).parameters
    options: dict[str, Any] = {}
    if cache is not None:
        options |= {"cache" if "cache" in accepted else "past_key_values": cache, "use_cache": True}
    elif "use_cache" in accepted:
        options["use_cache"] = False
    if "logits_to_keep" in accepted:
        output = model(input_ids=input_ids, logits_to_keep=keep, **options)
    else:
        with _narrowed_head(model, keep):
            output = model(input_ids=input_ids, **options)
    logits = output if isinstance(output, Tensor) else output.logits
    return logits[:, -keep:].float()


@contextmanager
def _narrowed_head(model: Any, keep: int) -> Iterator[None]:
    """For models without `logits_to_keep`: the output layer is handed the last positions only."""
    inner = without_adapters(model)
    get = getattr(inner, "get_output_embeddings", None)
    head = (get() if callable(get) else None) or getattr(inner, "lm_head", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"{type(inner).__name__} takes no logits_to_keep and names no output layer (get_output_embeddings or "
            "lm_head), so the logits of all positions would be computed; give its forward a logits_to_keep argument"
        )

    def narrow(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][:, -keep:], *args[1:])

    handle = head.register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()
