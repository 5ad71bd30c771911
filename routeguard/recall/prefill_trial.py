"""Whether a prompt may be read in pieces: many caches do not carry everything over, and say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.recall.logits import last_logits

# What recomputation in float32 differs by is a few 1e-6; of what a forgetful cache changes, the least seen is 1e-2.
LAYER_TOLERANCE = 1e-3
LOGIT_TOLERANCE = 1e-3


@torch.no_grad()
def takes_prompts_in_pieces(model: Any, input_ids: Tensor, keep: int, prefill_tokens: int) -> bool:
    """Whether reading in pieces gives what reading at once gives, found out by doing both on `input_ids`.

    Many recurrent and convolution layers start anew with each piece; their answers would be wrong without a warning.
    Compared are the logits and what every part of every layer puts out, because the error of a single layer can be
    small in the logits. Both readings compute in float32, one layer's weights at a time, because rounding in 16 bits
    hides as much. The cache is used even if `input_ids` are no longer than a piece. Derived.

    Args:
        model: a causal language model in evaluation mode; its weights are as before afterwards.
        input_ids: `[rows, tokens]`, on the model's device.
        keep: how many of the last positions are compared; they follow the end of a piece.
        prefill_tokens: length of a piece.
    """
    prefill_tokens = min(prefill_tokens, input_ids.shape[1] - keep)
    with computed_in_float32(model):
        try:
            with _layer_outputs(model, keep) as in_pieces:
                pieces = last_logits(model, input_ids, keep, prefill_tokens=prefill_tokens)
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, IndexError, KeyError):
            return False
        with _layer_outputs(model, keep) as at_once:
            whole = last_logits(model, input_ids, keep)
    if float((pieces - whole).abs().max() / whole.std().clamp_min(1e-6)) >= LOGIT_TOLERANCE:
        return False
    return all(
        _relative_error(found, at_once[name]) < LAYER_TOLERANCE
        for name, found in in_pieces.items()
        if name in at_once and found.shape == at_once[name].shape
    )


@contextmanager
def computed_in_float32(model: nn.Module) -> Iterator[None]:
    """Let a 16-bit model compute in float32 inside, holding the float32 weights of one decoder layer at a time.

    A decoder layer is an element of an outermost `nn.ModuleList`. Quantised weights stay what they are.
    """
    with ExitStack() as stack:
        for module in _units(model):
            if isinstance(module, nn.Embedding):  # a look-up: its result can be widened instead of the table
                stack.callback(module.register_forward_hook(_widen_output).remove)
                continue
            widened: list[tuple[Tensor, Tensor]] = []

            def widen(module: nn.Module, args: Any, kept: list[tuple[Tensor, Tensor]] = widened) -> None:
                for tensor in (*module.parameters(), *module.buffers()):
                    if tensor.is_floating_point() and tensor.element_size() == 2:
                        kept.append((tensor, tensor.data))
                        tensor.data = tensor.data.float()

            def narrow(module: nn.Module, args: Any, output: Any, kept: list[tuple[Tensor, Tensor]] = widened) -> None:
                while kept:
                    tensor, data = kept.pop()
                    tensor.data = data

            stack.callback(module.register_forward_pre_hook(widen).remove)
            stack.callback(module.register_forward_hook(narrow, always_call=True).remove)
        yield


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts that hold no list of layers, and the elements of those lists."""
    if isinstance(module, nn.ModuleList):
        yield from module
    elif any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        for child in module.children():
            yield from _units(child)
    else:
        yield module


def _widen_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() and output.element_size() == 2 else output


@contextmanager
def _layer_outputs(model: nn.Module, keep: int) -> Iterator[dict[str, Tensor]]:
    """By name, the last `keep` positions of what each direct part of a decoder layer put out last."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for i, layer in enumerate(unit for unit in _units(model) if next(unit.children(), None) is not None):
            for name, part in layer.named_children():

                def record(module: nn.Module, args: Any, output: Any, key: str = f"{i}.{name}") -> None:
                    first = output[0] if isinstance(output, tuple) and output else output
                    if isinstance(first, Tensor) and first.is_floating_point() and first.dim() == 3:
                        found[key] = first[:, -keep:].detach().clone()

                stack.callback(part.register_forward_hook(record).remove)
        yield found


def _relative_error(found: Tensor, expected: Tensor) -> float:
    size = expected.float().square().mean().sqrt().clamp_min(1e-12)
    return float((found.float() - expected.float()).square().mean().sqrt() / size)
