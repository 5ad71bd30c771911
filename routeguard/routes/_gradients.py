"""Differentiate recorded attention calls with respect to the parameters of the block that made them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from routeguard.routes._capture import AttentionEvent

_COTANGENTS = 2  # random directions: one could cancel to an exact zero in half precision

Patterns = dict[str, Tensor]  # by parameter name, booleans of the parameter's shape: has a gradient


@dataclass
class Findings:
    """What the calls of one block showed, united: masks[parameter][role] has the parameter's shape."""

    masks: dict[str, Patterns] = field(default_factory=dict)
    reach: int = 0

    def add(self, role: str, patterns: Patterns) -> None:
        for name, pattern in patterns.items():
            roles = self.masks.setdefault(name, {})
            roles[role] = roles[role] | pattern if role in roles else pattern


class EventReader:
    """Collects findings from the attention calls of each layer, by the module that owns the projections."""

    def __init__(
        self, model: nn.Module, stand_ins: dict[str, nn.Parameter], *, skipped: frozenset[int] = frozenset(), seed: int
    ) -> None:
        self._model = model
        self._skipped = skipped  # numbers of calls, counted from the start of the pass
        self._num_calls = 0
        self._names = {id(parameter): name for name, parameter in stand_ins.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self.findings: dict[str, Findings] = {}
        self.skipped_modules: set[str] = set()
        self.not_over_tokens: set[str] = set()
        self.without_weights: set[str] = set()
        self.not_causal: set[str] = set()
        self.repeated: set[str] = set()  # blocks with several calls in one pass of their layer

    def __call__(self, events: list[AttentionEvent], inputs: list[Tensor]) -> None:
        """Read the attention calls of one layer; `inputs` are the leaves at which the layer was cut from the others."""
        owners = [owner for owner in (self._read(event, inputs) for event in events) if owner is not None]
        self.repeated |= {owner for owner in owners if owners.count(owner) > 1}

    def parameters_of(self, module: str) -> dict[str, nn.Parameter]:
        """The differentiable parameters of a module, by their name in the whole model."""
        parameters = self._model.get_submodule(module).parameters()
        return {self._names[id(parameter)]: parameter for parameter in parameters if id(parameter) in self._names}

    def _read(self, event: AttentionEvent, inputs: list[Tensor]) -> str | None:
        self._num_calls += 1
        if self._num_calls - 1 in self._skipped:
            self.skipped_modules.add(event.path[-1])
            return None
        for label, tensors in (("queries", event.queries), ("keys", event.keys)):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                raise ValueError(
                    f"{label} of '{event.path[-1]}' are not finite; the probe needs weights without NaN or inf"
                )
        if not self._over_tokens(event, inputs):
            self.not_over_tokens.add(event.path[-1])
            return None
        scope = self.parameters_of(event.layer)
        query, key = self._patterns(event.queries, scope), self._patterns(event.keys, scope)
        owner = self._owner(event, query, key)
        if owner is None:
            self.without_weights.add(event.path[-1])
            return None
        inside = self.parameters_of(owner)
        found = self.findings.setdefault(owner, Findings())
        found.add("query", {name: pattern for name, pattern in query.items() if name in inside})
        found.add("key", {name: pattern for name, pattern in key.items() if name in inside})
        if event.value is not None:
            found.add("value", self._patterns([event.value], inside))
        others = [tensor for tensor in (event.logits, event.mask) if tensor is not None]
        for name, pattern in self._patterns(others, inside).items():
            for known in (query, key):
                pattern = pattern & ~known[name] if name in known else pattern
            found.add("bias", {name: pattern})
        reach, ahead = self._reach(event, inputs)
        found.reach = max(found.reach, reach)
        if ahead:
            self.not_causal.add(owner)
        return owner

    def _over_tokens(self, event: AttentionEvent, inputs: list[Tensor]) -> bool:
        """Whether there are several queries that depend on the tokens, unlike a learned query over earlier layers."""
        if event.visible is None or event.visible.shape[0] < 2:
            return False
        live = [query for query in event.queries if query.requires_grad]
        if not inputs or not live:
            return bool(live)
        ones = [torch.ones_like(query) for query in live]
        gradients = torch.autograd.grad(live, inputs, ones, retain_graph=True, allow_unused=True)
        return any(gradient is not None for gradient in gradients)

    def _patterns(self, outputs: Iterable[Tensor], scope: dict[str, nn.Parameter]) -> Patterns:
        """Where parameters of `scope` have a gradient from random directions in `outputs`; others are left out."""
        live = [output for output in outputs if output.requires_grad]
        patterns: Patterns = {}
        if not live or not scope:
            return patterns
        for _ in range(_COTANGENTS):
            directions = [self._direction(output) for output in live]
            gradients = torch.autograd.grad(
                live, list(scope.values()), directions, retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(scope, gradients, strict=True):
                if gradient is not None:
                    pattern = gradient != 0
                    patterns[name] = patterns[name] | pattern if name in patterns else pattern
        return {name: pattern for name, pattern in patterns.items() if bool(pattern.any())}

    def _direction(self, output: Tensor) -> Tensor:
        return torch.randn(output.shape, generator=self._generator).to(output)

    def _owner(self, event: AttentionEvent, query: Patterns, key: Patterns) -> str | None:
        """The innermost module on the call path with a projection of the queries, and of the keys if there is one."""
        wanted = [{name for name, pattern in patterns.items() if pattern.dim() >= 2} for patterns in (query, key)]
        if not wanted[0]:
            return None
        for path in reversed(event.path):
            inside = self.parameters_of(path).keys()
            if all(not some or inside & some for some in wanted):
                return path
            if path == event.layer:
                break
        return None

    def _reach(self, event: AttentionEvent, inputs: list[Tensor]) -> tuple[int, bool]:
        """Largest distance from a query back to a token that it sees, and whether a query sees a later token."""
        assert event.visible is not None
        num_queries = event.visible.shape[0]
        seen = event.visible[:, : event.num_keys].cpu()
        source = torch.arange(seen.shape[1])
        if seen.shape[1] != num_queries:  # prefixes, or keys that stand for several tokens
            source = self._first_tokens(event, inputs, num_queries)[: seen.shape[1]]
            seen = seen & (source >= 0)
        distances = (torch.arange(num_queries)[:, None] - source[None, :])[seen]
        if not distances.numel():
            return 0, False
        return max(int(distances.max()), 0), bool((distances < 0).any())

    def _first_tokens(self, event: AttentionEvent, inputs: list[Tensor], num_tokens: int) -> Tensor:
        """The first token that each key depends on, -1 for keys that depend on no token."""
        leaves = [leaf for leaf in inputs if leaf.dim() >= 3 and num_tokens in leaf.shape]
        keys = [key for key in event.keys if key.requires_grad and key.shape[-2] == event.num_keys]
        first = torch.full((event.num_keys,), -1)
        if not leaves or not keys:
            return first
        for position in range(event.num_keys):
            parts = [key.select(-2, position) for key in keys]
            directions = [self._direction(part) for part in parts]
            for gradient in torch.autograd.grad(parts, leaves, directions, retain_graph=True, allow_unused=True):
                if gradient is None:
                    continue
                axis = list(gradient.shape).index(num_tokens)
                touched = (gradient != 0).movedim(axis, 0).flatten(1).any(dim=1).nonzero()
                if touched.numel():
                    earliest = int(touched[0])
                    first[position] = earliest if first[position] < 0 else min(earliest, int(first[position]))
        return first
