"""Full attention matrices of a model, as its own eager attention computes and returns them: the thing to agree with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routeguard.diagnostics.capture import attention_module
from routeguard.diagnostics.running import chosen_attention


def sharpened(model: Any, factor: float = 8.0) -> Any:
    """The model with larger matrices in its attention modules: random tiny models attend almost evenly otherwise.

    A soft cap is set to 0.5, so that it caps.
    """
    with torch.no_grad():
        for geometry in {id(attention_module(model, g)): g for g in chosen_attention(model, None)}.values():
            module = attention_module(model, geometry)
            if getattr(module, "attn_logit_softcapping", None):
                module.attn_logit_softcapping = 0.5
            for parameter in module.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(factor)
    return model


def full_attention(model: Any, input_ids: Tensor) -> dict[int, Tensor]:
    """Layer to [B, H, T, T], collected from what the attention modules return (tied modules are not for this)."""
    tokens, found, handles = input_ids.shape[1], {}, []
    for geometry in chosen_attention(model, None):

        def keep(module: Any, args: Any, output: Any, layer: int = geometry.layer) -> None:
            for item in output:
                if isinstance(item, Tensor) and item.dim() == 4 and item.shape[-2] == tokens <= item.shape[-1]:
                    found[layer] = item[..., :tokens].detach().float()

        handles.append(attention_module(model, geometry).register_forward_hook(keep))
    try:
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    return found


def full_distances(model: Any, input_ids: Tensor) -> dict[int, Tensor]:
    """Layer to [B, H, T]: Σ_s A[t,s]·(t − s) from the full matrices."""
    steps = torch.arange(input_ids.shape[1])
    gaps = (steps[:, None] - steps).float()
    return {layer: (matrix * gaps).sum(-1) for layer, matrix in full_attention(model, input_ids).items()}
