"""The loss made a few positions at a time: against the loss in one piece, and how large its tensors are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Lfm2ForCausalLM

from routeguard.diagnostics.chunked_loss import chunked_loss, plain_loss
from routeguard.diagnostics.decoder import find_decoder
from routeguard.diagnostics.gradient import gradient_locality
from tests.attention_reference import sharpened
from tests.zoo.build import build, example_inputs


def scaled(name: str, factor: float) -> Any:
    """A tiny model in float64 whose logits are scaled, or capped, by `factor`."""
    model = sharpened(build(name)).double()
    model.config.final_logit_softcapping = model.config.logits_scaling = model.logit_scale = factor
    return model


@pytest.mark.parametrize("name", ["lfm2", "gemma2", "granite", "cohere", "opt", "csm", "kosmos-2.5", "gpt2"])
@pytest.mark.parametrize("loss_tokens", [1, 5, 23, 500])
def test_loss_and_gradient_are_those_of_one_piece(name: str, loss_tokens: int) -> None:
    model, input_ids = sharpened(build(name)).double(), example_inputs(name)["input_ids"]
    labels = input_ids.clone()
    labels[0, [3, 4, 9]] = -100
    plain = plain_loss(model, input_ids, labels)
    decoder = find_decoder(model, input_ids)
    chunked = chunked_loss(model, input_ids, labels, decoder=decoder, loss_tokens=loss_tokens)
    assert chunked.gradient is not None and plain.gradient is None
    assert chunked.value == pytest.approx(plain.value, rel=1e-6)
    parameters = [p for p in model.parameters() if p.requires_grad]
    whole = torch.autograd.grad(plain.end, parameters, allow_unused=True)
    parts = torch.autograd.grad(chunked.end, parameters, chunked.gradient, allow_unused=True)
    compared = 0
    head = model.get_output_embeddings().weight
    for parameter, expected, found in zip(parameters, whole, parts, strict=True):
        if parameter is head or expected is None or found is None:  # the head itself gets no gradient here
            continue
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
        compared += 1
    assert compared >= 8
    assert all(p.grad is None for p in model.parameters()) and "forward" not in vars(decoder)


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_scaled_and_capped_logits(name: str) -> None:
    input_ids = example_inputs(name)["input_ids"]
    model = scaled(name, 0.25)
    plain = gradient_locality(model, input_ids, num_queries=None, loss_tokens=None)
    chunked = gradient_locality(model, input_ids, num_queries=None, loss_tokens=5)
    other = gradient_locality(scaled(name, 1.0), input_ids, num_queries=None, loss_tokens=5)
    np.testing.assert_allclose(chunked.pooled.values, plain.pooled.values, rtol=1e-6)
    assert not np.allclose(chunked.pooled.values, other.pooled.values, rtol=0.05)  # the factor is in the loss


class LargestLogits(TorchDispatchMode):
    """Most rows of any tensor whose last size is the vocabulary, but the output layer's weight."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in () if func is torch.ops.aten.t.default else tree_leaves(result):
            if isinstance(item, Tensor) and item.dim() > 1 and item.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, item.numel() // self.vocabulary)
        return result


def test_no_tensor_holds_the_logits_of_more_positions() -> None:
    model, input_ids = build("lfm2"), example_inputs("lfm2", num_tokens=64)["input_ids"]
    model.resize_token_embeddings(211)  # a size that nothing else has
    rows = {}
    for loss_tokens in (None, 20, 4):
        with LargestLogits(211) as seen:
            gradient_locality(model, input_ids, loss_tokens=loss_tokens)
        rows[loss_tokens] = seen.rows
    assert rows == {None: 64, 20: 20, 4: 16}  # 16: the tokens on which it is tried out


def test_adapters_and_bf16() -> None:
    input_ids = example_inputs("lfm2")["input_ids"]
    model = get_peft_model(sharpened(build("lfm2")), LoraConfig(target_modules=["q_proj", "k_proj"]))
    plain, chunked = (gradient_locality(model, input_ids, loss_tokens=size).pooled.values for size in (None, 5))
    np.testing.assert_allclose(chunked, plain, rtol=1e-4)
    half = sharpened(build("lfm2")).bfloat16()
    plain, chunked = (gradient_locality(half, input_ids, loss_tokens=size).pooled.values for size in (None, 5))
    np.testing.assert_allclose(chunked, plain, rtol=0.05)


class Centred(Lfm2ForCausalLM):  # type: ignore[misc]
    """A model whose logits depend on those of other positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - output.logits.mean(1, keepdim=True)
        return output


def test_logits_that_depend_on_other_positions_are_refused() -> None:
    model, input_ids = build("lfm2"), example_inputs("lfm2")["input_ids"]
    model.__class__ = Centred
    with pytest.raises(ValueError, match=r"Centred has no decoder .* loss_tokens=None"):
        gradient_locality(model, input_ids)
    assert gradient_locality(model, input_ids, loss_tokens=None).loss > 0
    with pytest.raises(ValueError, match="loss_tokens=0; give at least 1"):
        gradient_locality(model, input_ids, loss_tokens=0)
