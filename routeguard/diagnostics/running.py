"""Run a model on tokens for a measurement, and leave it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.recall.quiet import undisturbed
from routeguard.routes._sandbox import config_of
from routeguard.routes.collection import ROUTING_ROLES, AttentionLayer
from routeguard.routes.find import find_in_memory


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and runs uncompiled; what `undisturbed` keeps is put back."""
    gradients = torch.is_grad_enabled()
    with undisturbed(model), torch.set_grad_enabled(gradients), torch.compiler.set_stance("force_eager"):
        yield


def run_tokens(model: nn.Module, input_ids: Tensor, *, keep_logits: bool = False) -> Any:
    """One forward pass on [B, T] tokens without a cache; logits of the last token only, where the model can.

    Raises ValueError for tokens of another shape, or that the model does not have.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; give [sequences, tokens], without padding")
    _refuse_unknown_tokens(model, input_ids)
    device = next(model.parameters()).device
    options: dict[str, Any] = {"use_cache": False}
    signatures = [inspect.signature(module.forward).parameters for module in islice(model.modules(), 4)]
    # A model with shared keys and values computes only the queries whose logits are kept.
    prunes = getattr(config_of(model), "num_kv_shared_layers", None)
    if not keep_logits and not prunes and any("logits_to_keep" in parameters for parameters in signatures):
        options["logits_to_keep"] = 1
    return model(input_ids=input_ids.to(device), **options)


def _refuse_unknown_tokens(model: nn.Module, input_ids: Tensor) -> None:
    try:
        size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # a module of one's own
        return
    largest = int(input_ids.max()) if input_ids.numel() else 0
    if largest >= size:
        raise ValueError(
            f"token {largest} is not one of this model's {size}; were the tokens made by another model's tokenizer?"
        )


def chosen_attention(model: nn.Module, layers: Iterable[int] | None) -> tuple[AttentionLayer, ...]:
    """Geometry of the full-attention layers of a model, or of those asked for; ValueError where there are none."""
    wanted = None if layers is None else tuple(layers)
    options = {"roles": ROUTING_ROLES, "norms": False, "shared": False, "layers": wanted}
    return find_in_memory(model, options).attention


def over_tokens(call: AttentionCall, num_tokens: int) -> bool:
    """Whether queries and keys are the input's tokens; False for some other softmax of the module.

    Raises ValueError for attention over something else (compressed keys, prompts that the model adds).
    """
    if call.num_queries == call.num_keys == num_tokens:
        return True
    if call.probabilities is not None:
        return False
    raise ValueError(
        f"layer {call.layer} attends from {call.num_queries} queries to {call.num_keys} keys where the input has "
        f"{num_tokens} tokens: its keys are not the tokens, and distances between tokens are not defined there"
    )


def require_seen(wanted: Iterable[int], seen: Iterable[int]) -> None:
    """Raise ValueError for layers whose attention call stayed hidden."""
    hidden = sorted(set(wanted) - set(seen))
    if hidden:
        raise ValueError(
            f"no attention call seen in layers {hidden}: they use an opaque kernel; load the model with "
            'attn_implementation="sdpa" or "eager" for diagnostics'
        )
