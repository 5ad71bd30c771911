"""Differentiate recorded attention calls with respect to the parameters of the block that made them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from routeguard.routes._capture import AttentionEvent

_COTANGENTS = 2  # random directions: one could cancel to an exact zero in half precision


@dataclass
class Findings:
    """Gradient patterns of one block, united over its calls: masks[parameter][role] has the parameter's shape."""

    masks: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    reach: int = 0
    num_queries: int = 0

    def add(self, role: str, patterns: dict[str, Tensor]) -> None:
        for name, pattern in patterns.items():
            roles = self.masks.setdefault(name, {})
            roles[role] = roles[role] | pattern if role in roles else pattern


def read_event(
    model: nn.Module,
    event: AttentionEvent,
    inputs: list[Tensor],
    names: dict[int, str],
    findings: dict[str, Findings],
    notes: list[str],
    generator: torch.Generator,
) -> None:
    """Differentiate one attention call and add what it shows to `findings` under the name of its block."""
    for label, tensor in (("queries", event.queries), ("keys", event.keys)):
        if not all(bool(torch.isfinite(part).all()) for part in tensor):
            raise ValueError(
                f"{label} of '{event.path[-1]}' are not finite; the probe needs weights without NaN or inf"
            )
    scope = {names[id(p)]: p for p in model.get_submodule(event.layer).parameters() if id(p) in names}
    query = _patterns(event.queries, scope, generator)
    key = _patterns(event.keys, scope, generator)
    owner = _owner(model, event, scope, query, key, names)
    if owner is None:
        notes.append(f"'{event.path[-1]}' attends, but no weight of '{event.layer}' feeds its queries: left out")
        return
    found = findings.setdefault(owner, Findings())
    inside = {names[id(p)]: p for p in model.get_submodule(owner).parameters() if id(p) in names}
    found.add("query", {name: pattern for name, pattern in query.items() if name in inside})
    found.add("key", {name: pattern for name, pattern in key.items() if name in inside})
    if event.value is not None:
        found.add("value", _patterns([event.value], inside, generator))
    others = [tensor for tensor in (event.logits, event.mask) if tensor is not None]
    for name, pattern in _patterns(others, inside, generator).items():
        for known in (query, key):
            pattern = pattern & ~known[name] if name in known else pattern
        found.add("bias", {name: pattern})
    if event.visible is not None:
        reach, ahead = _reach(event, inputs, generator)
        found.reach = max(found.reach, reach)
        found.num_queries = max(found.num_queries, event.visible.shape[0])
        if ahead:
            notes.append(f"'{owner}' is not causal: queries see later tokens")


def _patterns(
    outputs: Iterable[Tensor], scope: dict[str, nn.Parameter], generator: torch.Generator
) -> dict[str, Tensor]:
    """Where each parameter of `scope` has a gradient from random directions in `outputs`; without parameters that have none."""
    live = [output for output in outputs if output.requires_grad]
    patterns: dict[str, Tensor] = {}
    if not live or not scope:
        return patterns
    for _ in range(_COTANGENTS):
        directions = [torch.randn(output.shape, generator=generator).to(output) for output in live]
        gradients = torch.autograd.grad(live, list(scope.values()), directions, retain_graph=True, allow_unused=True)
        for name, gradient in zip(scope, gradients):
            if gradient is not None:
                pattern = gradient != 0
                patterns[name] = patterns[name] | pattern if name in patterns else pattern
    return {name: pattern for name, pattern in patterns.items() if bool(pattern.any())}


def _owner(
    model: nn.Module,
    event: AttentionEvent,
    scope: dict[str, nn.Parameter],
    query: dict[str, Tensor],
    key: dict[str, Tensor],
    names: dict[int, str],
) -> str | None:
    """The innermost module on the call path that owns a projection of the queries, and one of the keys if the layer has any."""
    wanted = [
        {name for name, pattern in patterns.items() if pattern.dim() >= 2 and name in scope}
        for patterns in (query, key)
    ]
    if not wanted[0]:
        return None
    for path in reversed(event.path):
        inside = {names[id(p)] for p in model.get_submodule(path).parameters() if id(p) in names}
        if all(not some or inside & some for some in wanted):
            return path
        if path == event.layer:
            break
    return None


def _reach(event: AttentionEvent, inputs: list[Tensor], generator: torch.Generator) -> tuple[int, bool]:
    """Largest distance from a query back to a token that it sees, and whether a query sees a later token."""
    assert event.visible is not None
    num_queries = event.visible.shape[0]
    seen = event.visible[:, : event.num_keys].cpu()
    distance = torch.arange(num_queries)[:, None] - torch.arange(seen.shape[1])[None, :]
    if seen.shape[1] != num_queries:
        first = _sources(event, inputs, num_queries, generator)
        distance = torch.arange(num_queries)[:, None] - first[None, : seen.shape[1]]
        seen = seen & (first[None, : seen.shape[1]] >= 0)
    distances = distance[seen]
    if not distances.numel():
        return 0, False
    return max(int(distances.max()), 0), bool((distances < 0).any())


def _sources(event: AttentionEvent, inputs: list[Tensor], num_tokens: int, generator: torch.Generator) -> Tensor:
    """The first token that each key depends on, -1 for keys that depend on no token (prefixes)."""
    leaves = [leaf for leaf in inputs if leaf.dim() >= 3 and num_tokens in leaf.shape]
    first = torch.full((event.num_keys,), -1)
    for position in range(event.num_keys):
        parts = [
            key.select(-2, position) for key in event.keys if key.requires_grad and key.shape[-2] == event.num_keys
        ]
        if not parts or not leaves:
            break
        directions = [torch.randn(part.shape, generator=generator).to(part) for part in parts]
        gradients = torch.autograd.grad(parts, leaves, directions, retain_graph=True, allow_unused=True)
        for gradient in gradients:
            if gradient is None:
                continue
            axis = list(gradient.shape).index(num_tokens)
            touched = (gradient != 0).movedim(axis, 0).flatten(1).any(dim=1).nonzero()
            if touched.numel():
                earliest = int(touched[0])
                first[position] = earliest if first[position] < 0 else min(earliest, int(first[position]))
    return first
