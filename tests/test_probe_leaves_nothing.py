"""The autograd probe leaves a model, its gradients and the libraries as they were."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from routeguard.routes._sandbox import sandbox
from routeguard.routes.probe import probe_routes
from tests.perturbation import perturbation_check
from tests.zoo.build import build


def fingerprint(model: nn.Module) -> list[Any]:
    from transformers.modeling_utils import AttentionInterface

    found: list[Any] = [
        getattr(AttentionInterface, "get_interface", None),
        AttentionInterface.__getitem__,
        functional.softmax,
        torch.softmax,
    ]
    found += [sorted(vars(AttentionInterface)), torch.get_rng_state().tolist(), copy.deepcopy(vars(model.config))]
    for name, module in model.named_modules():
        hooks = [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called)]
        found.append((name, id(module), module.training, hooks))
        found += [(key, value) for key, value in vars(module).items() if isinstance(value, int | str | float)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        found.append((name, id(tensor), tensor.requires_grad, tensor._version, grad, tensor.detach().tolist()))
    return found


@pytest.mark.parametrize("case", ["gpt_oss", "mistral/window", "qwen3_next", "gpt_neo"])
def test_the_model_is_left_as_it_was(case: str) -> None:
    model = build(case).train()
    model.config.sliding_window = 4096
    model.set_attn_implementation("eager")
    model.get_output_embeddings().weight.requires_grad_(False)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = fingerprint(model)
    result = probe_routes(model)
    assert fingerprint(model) == before
    assert perturbation_check(model, replace(result, blocks=result.blocks[-1:])).agrees
    assert fingerprint(model) == before


def test_the_model_is_left_as_it_was_after_an_exception() -> None:
    model = build("llama")
    model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError):
        probe_routes(model)
    assert fingerprint(model) == before


def test_the_fingerprint_notices_changes() -> None:
    model = build("llama")
    before = fingerprint(model)
    with sandbox(model):
        assert fingerprint(model) != before
    assert fingerprint(model) == before
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1
    assert fingerprint(model) != before
