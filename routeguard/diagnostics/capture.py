"""Show every softmax-attention call of chosen layers to a function, while a model runs, whatever computes them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from routeguard.diagnostics.attention_call import AttentionCall, Place, fused_call, interface_call
from routeguard.routes.attention_functions import watched_attention_functions
from routeguard.routes.collection import AttentionLayer

# Gets the call and its result [B, H, T, d_v] (None where only probabilities were seen); may return another result.
Visit = Callable[[AttentionCall, Tensor | None], Tensor | None]
_POSITIONAL = ("module", "query", "key", "value", "attention_mask")


@contextmanager
def captured_calls(model: nn.Module, attention: Iterable[AttentionLayer], visit: Visit) -> Iterator[set[int]]:
    """Inside, `visit` sees each softmax-attention call of the layers in `attention`, and may replace its result.

    Seen are calls through transformers' attention functions (eager, SDPA, flash, registered ones), direct calls of
    `scaled_dot_product_attention`, and softmaxes over [heads, queries, keys] of modules that use neither. Nothing of
    the model changes; hooks and patches are gone on the way out.

    Yields:
        The layers seen so far.
    """
    recorder = _Calls(model, list(attention), visit)
    with ExitStack() as stack:
        recorder.hook(stack)
        stack.enter_context(watched_attention_functions(recorder.wrap))
        stack.enter_context(recorder)
        yield recorder.seen


class _Calls(TorchFunctionMode):
    """Knows which attention module is running in which layer, and reports attention calls to `visit`."""

    def __init__(self, model: nn.Module, attention: list[AttentionLayer], visit: Visit) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._visit = visit
        self._model = model
        self._places = {name: geometry.layer for geometry in attention for name in [module_name(model, geometry)]}
        self._slots: list[tuple[str, str]] = [_slot(name) for name in self._places]
        self._slot = ("", "")  # stack and index of the layer that is running
        self._inside: list[nn.Module] = []  # attention modules entered
        self._busy = False  # inside an attention function, or in a visit

    def hook(self, stack: ExitStack) -> None:
        modules = {id(module): module for module in map(self._model.get_submodule, self._places)}
        for module in modules.values():
            stack.callback(module.register_forward_pre_hook(self._enter_attention).remove)
            stack.callback(module.register_forward_hook(self._leave_attention, always_call=True).remove)
        for name in dict.fromkeys(name for name, _ in self._slots):
            for index, module in self._model.get_submodule(name).named_children():
                enter = functools.partial(self._enter_layer, (name, index))
                stack.callback(module.register_forward_pre_hook(enter).remove)

    def _enter_layer(self, slot: tuple[str, str], module: nn.Module, args: Any) -> None:
        self._slot = slot

    def _enter_attention(self, module: nn.Module, args: Any) -> None:
        self._inside.append(module)

    def _leave_attention(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop()

    def _place(self) -> Place | None:
        """The layer and attention module that are running, or None outside of those wanted."""
        if self._busy or not self._inside:
            return None
        for (name, layer), slot in zip(self._places.items(), self._slots, strict=True):
            if slot == self._slot and self._model.get_submodule(name) is self._inside[-1]:
                return layer, name
        return None

    def wrap(self, function: Any) -> Any:
        if not callable(function) or getattr(function, "_routeguard_shown", False):
            return function

        @functools.wraps(function)
        def shown(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
            place = self._place()
            if place is None or not all(isinstance(named.get(name), Tensor) for name in ("query", "key")):
                return function(*args, **kwargs)
            self._busy = True
            try:
                result = function(*args, **kwargs)
                call = interface_call(place, function, named)
                changed = self._show(call, result[0].transpose(1, 2))
            finally:
                self._busy = False
            return result if changed is None else (changed.transpose(1, 2), *result[1:])

        shown._routeguard_shown = True  # type: ignore[attr-defined]
        return shown

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        place = self._place() if name in ("scaled_dot_product_attention", "softmax") else None
        if place is None:
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention" and (args[0] if args else kwargs["query"]).dim() != 4:
            return func(*args, **kwargs)
        self._busy = True
        try:
            result = func(*args, **kwargs)
            if name == "softmax":
                self._softmax(place, result)
                return result
            changed = self._show(fused_call(place, *args, **kwargs), result)
        finally:
            self._busy = False
        return result if changed is None else changed

    def _softmax(self, place: Place, probabilities: Tensor) -> None:
        """Softmax over the keys of several tokens in an attention module that calls no attention function."""
        if probabilities.dim() not in (3, 4) or min(probabilities.shape[-2:]) < 2:
            return
        shaped = probabilities if probabilities.dim() == 4 else probabilities.unsqueeze(0)
        self._show(AttentionCall(*place, shaped, shaped, shaped, probabilities=shaped), None)

    def _show(self, call: AttentionCall, result: Tensor | None) -> Tensor | None:
        self.seen.add(call.layer)
        return self._visit(call, result)


def module_name(model: nn.Module, geometry: AttentionLayer) -> str:
    """Name of the module that computes the attention of a layer.

    Layers that share parameters are listed under the module of the first of them.
    """
    name = geometry.module
    own = re.sub(r"\.\d+(?=\.|$)", f".{geometry.layer}", name, count=1)
    try:
        same = type(model.get_submodule(own)) is type(model.get_submodule(name))
    except AttributeError:
        return name
    return own if same else name


def attention_module(model: nn.Module, geometry: AttentionLayer) -> nn.Module:
    """The module of `module_name`."""
    return model.get_submodule(module_name(model, geometry))


def _slot(module: str) -> tuple[str, str]:
    """`("model.layers", "3")` for `model.layers.3.self_attn`."""
    found = re.match(r"(.*?)\.(\d+)(?:\.|$)", module)
    if not found:
        raise ValueError(f"attention module {module!r} is in no numbered stack of layers")
    return found[1], found[2]
