"""Hybrids of several sizes on the meta device: their shapes and held rows, without a byte of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks._rank_memory import Shape
from routeguard import find_routes
from routeguard.routes.collection import Routes

# name: model type, what differs from the config's defaults. The last is no released model: a hybrid of that size.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "7B, dense, queries apart": ("olmo_hybrid", {}),
    "9B, dense": ("qwen3_5_text", {}),
    "80B-A3B": ("qwen3_next", {}),
    "1T-A32B": (
        "qwen3_next",
        {
            "hidden_size": 7168,
            "num_hidden_layers": 60,
            "num_attention_heads": 48,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 384,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "shared_expert_intermediate_size": 1024,
        },
    ),
}


@dataclass(frozen=True)
class ScaleModel:
    """A model's parameters for the formulas, its routes, and how many parameters a token meets."""

    name: str
    tensors: tuple[Shape, ...]
    routes: Routes
    num_active: int

    @property
    def num_cells(self) -> int:
        """Numbers that a step of drift consists of: (layer, role) pairs."""
        return len({(route.layer, route.role) for route in self.routes})

    @property
    def splits_rows(self) -> bool:
        """Whether held rows lie beside others in one tensor."""
        return any(tensor.is_held and tensor.held is not None for tensor in self.tensors)


def build_meta(name: str) -> nn.Module:
    """One of `MODELS` on the meta device, in bfloat16."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, changes = MODELS[name]
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**changes), dtype=torch.bfloat16)
    return model


def describe(name: str) -> ScaleModel:
    """Build one of `MODELS` on the meta device and find its routes."""
    model = build_meta(name)
    routes = find_routes(model)
    return ScaleModel(name, shapes_of(model, routes), routes, _num_active(model))


def shapes_of(model: nn.Module, routes: Routes) -> tuple[Shape, ...]:
    """Every parameter, in order. Raises ValueError for rows along another dimension than the first."""
    other = [route.parameter for route in routes if route.rows is not None and route.dim != 0]
    if other:
        raise ValueError(f"{other[0]} is held by columns, which these formulas do not know")
    held = {name: routes.rows_of(name) for name in routes.parameters}
    return tuple(Shape(name, tuple(p.shape), held.get(name, ())) for name, p in model.named_parameters())


def _num_active(model: nn.Module) -> int:
    """Parameters that a token meets: of the experts, only those that it is sent to."""
    config: Any = model.config
    experts = getattr(config, "num_experts", 0)
    share = config.num_experts_per_tok / experts if experts else 1.0
    return round(sum(p.numel() * (share if ".experts." in n else 1) for n, p in model.named_parameters()))
