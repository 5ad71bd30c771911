"""Watch a forward pass and record every attention call: queries, keys, values and logits before the softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from routeguard.routes._logits import PRODUCTS, orient, products, visible_from_logits, visible_from_mask, walk
from routeguard.routes.attention_functions import watched_attention_functions

_MATMULS = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__"}


@dataclass(eq=False)
class AttentionEvent:
    """One attention call; several queries and keys if the logits are a sum of several products."""

    path: tuple[str, ...]
    layer: str
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    value: Tensor | None = None
    logits: Tensor | None = None  # [..., queries, keys and sinks], masked
    mask: Tensor | None = None  # what fused attention adds to the logits
    softmax_node: Any = None
    visible: Tensor | None = None  # [queries, keys and sinks] booleans: some head sees it
    num_keys: int = 0


class Recorder(TorchFunctionMode):
    """Records attention calls while a model runs under it, layer by layer.

    A decoder layer is an element of the outermost `nn.ModuleList` on the call path. Its input is cut from the graph, so
    that what it computes depends on its own parameters only, and `on_layer` gets its events, with the leaves at which
    it was cut, when it returns. Modules named in `cut_at` are cut from their inputs too.
    """

    def __init__(
        self,
        model: nn.Module,
        on_layer: Callable[[list[AttentionEvent], list[Tensor]], None],
        *,
        cut_at: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._on_layer = on_layer
        self._cut_at = cut_at
        self._names: dict[int, list[str]] = {}
        self._list_elements: set[str] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
            if isinstance(module, nn.ModuleList):
                self._list_elements |= {f"{name}.{child}" if name else child for child, _ in module.named_children()}
        self._model = model
        self.path: list[str] = []
        self._layer = ""
        self._inputs: list[Tensor] = []
        self._events: list[AttentionEvent] = []
        self._open: list[AttentionEvent] = []
        self.selections: set[tuple[str, ...]] = set()  # call paths on which top-k selection happened
        self.num_softmaxes = 0
        self.opaque: set[str] = set()  # modules whose attention call hid its softmax
        self.unreadable: set[str] = set()  # modules whose attention call hid its queries and keys

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record what runs inside. Hooks and patches are gone when it ends."""
        with ExitStack() as stack:
            for module in self._model.modules():
                handle = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(watched_attention_functions(self._wrap))
            stack.enter_context(self)
            yield
        self._flush()

    # --- where we are -------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = self._names[id(module)]
        above = f"{self.path[-1]}." if self.path and self.path[-1] else ""
        name = next((name for name in names if name.startswith(above)), names[0])
        self.path.append(name)
        if not self._layer and name in self._list_elements:
            self._layer = name
        elif name not in self._cut_at:
            return None
        return tuple(self._cut(value) for value in args), {key: self._cut(value) for key, value in kwargs.items()}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.path and self.path[-1] in self._names[id(module)] and self.path.pop() == self._layer:
            self._flush()
            self._layer = ""

    def _cut(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                return value
            leaf = value.detach().requires_grad_(True)
            self._inputs.append(leaf)
            return leaf.clone()  # a layer may change its input in place, which a leaf refuses
        if type(value) in (tuple, list):
            return type(value)(self._cut(item) for item in value)
        return value

    def _flush(self) -> None:
        events, inputs = self._events, self._inputs
        self._events, self._inputs = [], []
        if events:
            self._on_layer(events, inputs)

    def _new_event(self) -> AttentionEvent:
        event = AttentionEvent(path=tuple(self.path), layer=self._layer)
        self._events.append(event)
        return event

    # --- what is called -----------------------------------------------------------------------------------------------

    def _wrap(self, function: Any) -> Any:
        if not callable(function) or getattr(function, "_routeguard_watched", False):
            return function

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(("module", "query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
            query, key, value = named.get("query"), named.get("key"), named.get("value")
            if not (isinstance(query, Tensor) and isinstance(key, Tensor)) or self._open:
                return function(*args, **kwargs)
            event = self._new_event()
            event.queries, event.keys = [query], [key]
            event.value = value if isinstance(value, Tensor) else None
            event.num_keys = key.shape[-2]
            self._open.append(event)
            try:
                return function(*args, **kwargs)
            finally:
                self._open.pop()
                if event.visible is None:
                    self.opaque.add(event.path[-1])
                    window = named.get("sliding_window")
                    event.visible = visible_from_mask(
                        query.shape[-2], key.shape[-2], named.get("attention_mask"), True, window
                    )

        watched._routeguard_watched = True  # type: ignore[attr-defined]
        return watched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if name == "softmax":
            logits = args[0] if args else kwargs.get("input")
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if isinstance(logits, Tensor) and isinstance(dim, int):
                self._softmax(logits, dim, result)
        elif name == "scaled_dot_product_attention":
            self._fused(*args, **kwargs)
        elif name in _MATMULS and self._events:
            self._product([item for item in args if isinstance(item, Tensor)])
        elif name == "multi_head_attention_forward":
            self.unreadable.add(self.path[-1] if self.path else "")
        elif name == "topk":
            self.selections.add(tuple(self.path))
        return result

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> None:
        event = self._open[-1] if self._open else self._new_event()
        if not event.queries:
            event.queries, event.keys, event.value = [query], [key], value
            event.num_keys = key.shape[-2]
        event.mask = attn_mask
        event.visible = visible_from_mask(query.shape[-2], key.shape[-2], attn_mask, is_causal, None)

    def _softmax(self, logits: Tensor, dim: int, result: Tensor) -> None:
        self.num_softmaxes += 1
        if logits.dim() < 2 or logits.grad_fn is None:
            return
        rows = logits.movedim(dim, -1)
        if self._open:
            event = self._open[-1]
            if event.visible is not None:
                return
        else:
            factors = products(logits)
            if not factors:
                return
            event = self._new_event()
            for first, second in factors:
                query, key = orient(rows, first, second)
                event.queries.append(query)
                event.keys.append(key)
                event.num_keys = max(event.num_keys, key.shape[-1] if key is second else key.shape[-2])
        event.logits, event.softmax_node = rows, result.grad_fn
        event.visible = visible_from_logits(rows.detach())

    def _product(self, operands: list[Tensor]) -> None:
        """The other factor of a product with attention probabilities is the values."""
        waiting = {event.softmax_node: event for event in self._events if event.softmax_node and event.value is None}
        if not waiting or len(operands) < 2:
            return
        for operand, other in ((operands[-2], operands[-1]), (operands[-1], operands[-2])):
            for node in walk(operand.grad_fn, limit=12, stop=PRODUCTS):
                if node in waiting:
                    waiting[node].value = other
                    return
