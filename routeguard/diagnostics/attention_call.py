"""One softmax-attention call of a model, with everything that shapes its probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[int, str]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What one attention call was given, after rotary embedding, query and key norms and logit scaling of the model.

    Attributes:
        layer: decoder layer index.
        module: name of the attention module (a few layers hold two).
        query: [B, H, T, d].
        key: [B, KV, S, d]; KV divides H, query heads of a group are neighbours. Key `s` and query `t` are
            `t + S − T − s` tokens apart.
        value: [B, KV, S, d_v].
        scaling: factor on the products.
        softcap: logits become `softcap · tanh(logit / softcap)`, or None.
        sinks: logits that take part in the softmax and stand for no token, [H] or [B, H, T, 1], or None.
        bias: added to the logits, broadcasts to [B, H, T, S], or None.
        mask: booleans (True is visible) or added to the logits, broadcasts to [B, H, T, ≥ S], or None.
        causal: without a mask, whether keys after the query are hidden.
        window: without a mask, how many of the latest keys are visible, or None for all.
        probabilities: [B, H, T, S] as the model computed them, where it has no query and key to show; all else but
            `layer` and `module` is then meaningless.
    """

    layer: int
    module: str
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = True
    window: int | None = None
    probabilities: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return int((self.query if self.probabilities is None else self.probabilities).shape[1])

    @property
    def num_queries(self) -> int:
        return int((self.query if self.probabilities is None else self.probabilities).shape[2])

    @property
    def num_keys(self) -> int:
        return int(self.key.shape[2] if self.probabilities is None else self.probabilities.shape[3])

    def detached(self) -> AttentionCall:
        """The same call with tensors that are cut from the graph."""
        tensors: dict[str, Any] = {
            name: value.detach() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def interface_call(place: Place, function: Any, named: Mapping[str, Any]) -> AttentionCall:
    """Read a call of one of transformers' attention functions.

    Args:
        place: (layer, attention module) that is running.
        function: the attention function, for what it takes an absent mask to mean.
        named: its arguments by name, `module`, `query`, `key`, `value` and `attention_mask` among them.

    Raises:
        ValueError: a mask that cannot be read: of flex attention, or of padded input.
    """
    module, query, key = named["module"], named["query"], named["key"]
    scaling = named.get("scaling")
    if scaling is None:  # transformers' functions fall back to one of these two, which agree but for odd head sizes
        scaling = float(getattr(module, "head_dim", None) or query.shape[-1]) ** -0.5
    causal = named.get("is_causal")
    if causal is None:
        eager = getattr(function, "__name__", "").startswith("eager")
        causal = not eager and bool(getattr(module, "is_causal", True))
    return AttentionCall(
        layer=place[0],
        module=place[1],
        query=query,
        key=key,
        value=named["value"],
        scaling=float(scaling),
        softcap=named.get("softcap"),
        sinks=_sinks(module, named),
        bias=named.get("position_bias"),
        mask=readable_mask(named.get("attention_mask")),
        causal=causal,
        window=named.get("sliding_window"),
    )


def fused_call(
    place: Place,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Read a direct call of `torch.nn.functional.scaled_dot_product_attention`, whose arguments these are."""
    return AttentionCall(
        layer=place[0],
        module=place[1],
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=attn_mask,
        causal=is_causal,
    )


def readable_mask(mask: Any) -> Tensor | None:
    """A mask over queries and keys, or None for no mask. Raises ValueError for any other kind."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention with a {type(mask).__name__} for a mask cannot be read; load the model with "
            'attn_implementation="sdpa" or "eager" for diagnostics'
        )
    if mask.dim() == 2:
        if not bool(mask.all()):
            raise ValueError("padded input: give sequences of one length, without padding")
        return None
    return mask


def _sinks(module: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    for found in (named.get("s_aux"), named.get("sinks"), getattr(module, "sinks", None)):
        if isinstance(found, Tensor):
            return found
    return None


def masked_with(logits: Tensor, mask: Tensor) -> Tensor:
    """Apply a mask of either kind to logits, whose shape it broadcasts to."""
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
