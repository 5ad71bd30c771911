"""Find where routing lives with no table of architectures: differentiate one pass on a few random tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.routes._capture import AttentionEvent, Recorder
from routeguard.routes._gradients import EventReader, Findings
from routeguard.routes._probe_inputs import SLACK_TOKENS, longest_window, probe_inputs, run_model, with_other_tokens
from routeguard.routes._rows import Ranges, row_layout
from routeguard.routes._sandbox import sandbox
from routeguard.routes.wording import as_printed

ROLES = ("query", "key", "value", "bias")


@dataclass(frozen=True)
class ProbedTensor:
    """Which rows of a parameter feed an attention block.

    Attributes:
        parameter: full name in `model.named_parameters()`.
        dim: the dimension along which rows are counted.
        query_rows, key_rows, value_rows: merged (start, stop) ranges on which the queries, keys and values depend.
        bias_rows: ranges that move the attention logits other than through queries and keys: position biases, sinks,
            and what builds a learned mask.
    """

    parameter: str
    dim: int
    query_rows: Ranges
    key_rows: Ranges
    value_rows: Ranges
    bias_rows: Ranges = ()


@dataclass(frozen=True)
class ProbedBlock:
    """One attention block, as seen in one forward pass.

    Attributes:
        module: the smallest module that owns the projections, `model.get_submodule(module)`; a block that is tied
            into several layers appears once for each of them.
        layer: index of the decoder layer, None if the name holds no number.
        global_attention: whether late queries see the first tokens.
        reach_tokens: the largest distance between a query and a key that it sees, in tokens.
        tensors: the parameters of the module on which queries, keys or values depend, in `named_parameters()` order.
        selectors: unlisted parameters inside modules that choose with top-k (indexers, routers). A choice has no
            gradient: they may steer what is attended to all the same. Empty unless the block selects.
    """

    module: str
    layer: int | None
    global_attention: bool
    reach_tokens: int
    tensors: tuple[ProbedTensor, ...]
    selectors: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """What `probe_routes` found: blocks in the order they ran, and what the reader should know about them."""

    blocks: tuple[ProbedBlock, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for block in self.blocks:
            kind = "global" if block.global_attention else f"reaches {block.reach_tokens} tokens"
            lines.append(f"{block.module} (layer {block.layer}, {kind})")
            for tensor in block.tensors:
                rows = (
                    f"{role} {getattr(tensor, f'{role}_rows')}" for role in ROLES if getattr(tensor, f"{role}_rows")
                )
                lines.append(f"  {tensor.parameter} dim {tensor.dim}: {', '.join(rows)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    _repr_pretty_ = as_printed


def probe_routes(
    model: nn.Module,
    *,
    input_ids: Tensor | None = None,
    num_tokens: int = 24,
    seed: int = 0,
    extra_inputs: Mapping[str, Any] | None = None,
    entry: str = "",
) -> ProbeResult:
    """Find the parameter rows that feed queries, keys and values of every attention block, by autograd.

    Nothing of the model is changed: parameters are replaced by differentiable stand-ins during the pass, attention runs
    eagerly in evaluation mode, and everything is put back in `finally`.

    Args:
        model: a decoder with weights (not on the meta device) that takes `input_ids`.
        input_ids: [1, tokens] tokens to run; drawn at random, special tokens left out, by default.
        num_tokens: tokens to draw, default 24; raised to outgrow the attention windows of the configuration.
        seed: for the tokens and the random directions.
        extra_inputs: further arguments of the forward pass, for models that demand them. Attention that does not
            depend on `input_ids` (image towers, cross-attention) is then left out.
        entry: name of the submodule that takes `input_ids`, for wrappers without a forward pass; names in the result
            are those of `model` all the same.

    Returns:
        The blocks that attend with a softmax over positions. Layers without one (linear attention, state spaces,
        convolutions) and modules that did not run (vision towers) do not appear.

    Raises:
        ValueError: weights on the meta device or not finite, too few tokens, or no attention call seen.

    Source: derived.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "probe_routes needs a forward pass, but parameters are on the meta device; load the weights first"
        )
    notes: list[str] = []
    runner = model.get_submodule(entry)
    inputs = probe_inputs(
        runner, input_ids=input_ids, num_tokens=num_tokens, seed=seed, extra_inputs=extra_inputs, notes=notes
    )
    with sandbox(model, seed=seed, max_window_tokens=longest_window(inputs)) as stand_ins:
        skipped = _independent_of_tokens(model, runner, inputs) if extra_inputs else frozenset()
        reader, recorder = _pass(model, runner, inputs, stand_ins, skipped, seed)
        if reader.repeated:
            # A block that runs twice in a layer feeds itself; cut it from its own first run as well.
            cut_at = frozenset(reader.findings)
            reader, recorder = _pass(model, runner, inputs, stand_ins, skipped, seed, cut_at=cut_at)
        if not reader.findings:
            raise ValueError(_nothing_found(model, reader, recorder))
        selectors = {name: _selectors(name, reader, recorder) for name in reader.findings}
        shapes = _Context(
            order={name: index for index, name in enumerate(stand_ins)},
            modules=dict(model.named_modules(remove_duplicate=False)),
            num_tokens=int(inputs["input_ids"].shape[1]),
        )
        blocks = tuple(_block(name, found, selectors[name], shapes) for name, found in reader.findings.items())
    notes += _notes(blocks, reader, recorder)
    return ProbeResult(blocks=blocks, notes=tuple(notes))


def _pass(
    model: nn.Module,
    runner: nn.Module,
    inputs: dict[str, Any],
    stand_ins: dict[str, nn.Parameter],
    skipped: frozenset[int],
    seed: int,
    *,
    cut_at: frozenset[str] = frozenset(),
) -> tuple[EventReader, Recorder]:
    reader = EventReader(model, stand_ins, skipped=skipped, seed=seed)
    recorder = Recorder(model, reader, cut_at=cut_at)
    with recorder.watch():
        run_model(runner, inputs)
    return reader, recorder


def _independent_of_tokens(model: nn.Module, runner: nn.Module, inputs: dict[str, Any]) -> frozenset[int]:
    """Numbers, in the order of a pass, of attention calls whose queries or keys stay when the tokens change."""
    passes: list[list[tuple[list[Tensor], list[Tensor]]]] = []
    for arguments in (inputs, with_other_tokens(inputs)):
        calls: list[tuple[list[Tensor], list[Tensor]]] = []

        def keep(events: list[AttentionEvent], _: list[Tensor], calls: list[Any] = calls) -> None:
            calls += [([q.detach() for q in event.queries], [k.detach() for k in event.keys]) for event in events]

        with Recorder(model, keep).watch():
            run_model(runner, arguments)
        passes.append(calls)

    def same(first: list[Tensor], second: list[Tensor]) -> bool:
        return len(first) == len(second) and all(map(torch.equal, first, second))

    return frozenset(
        number
        for number, (one, other) in enumerate(zip(*passes, strict=False))
        if same(one[0], other[0]) or same(one[1], other[1])
    )


@dataclass(frozen=True)
class _Context:
    order: dict[str, int]
    modules: dict[str, nn.Module]
    num_tokens: int


def _block(name: str, found: Findings, selectors: tuple[str, ...], context: _Context) -> ProbedBlock:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    tensors = []
    for parameter in sorted(found.masks, key=context.order.__getitem__):
        masks = {role: mask for role, mask in found.masks[parameter].items() if bool(mask.any())}
        if masks:
            dim, ranges = row_layout(masks, context.modules.get(parameter.rpartition(".")[0]))
            rows = {f"{role}_rows": ranges.get(role, ()) for role in ROLES}
            tensors.append(ProbedTensor(parameter=parameter, dim=dim, **rows))
    listed = {tensor.parameter for tensor in tensors}
    return ProbedBlock(
        module=name,
        layer=int(number[1]) if number else None,
        global_attention=found.reach >= context.num_tokens - 1 - SLACK_TOKENS,
        reach_tokens=found.reach,
        tensors=tuple(tensors),
        selectors=tuple(selector for selector in selectors if selector not in listed),
    )


def _selectors(block: str, reader: EventReader, recorder: Recorder) -> tuple[str, ...]:
    """Parameters of the modules inside a block that call top-k."""
    inner = {path[-1] for path in recorder.selections if block in path and path[-1] != block}
    return tuple(sorted({name for path in inner for name in reader.parameters_of(path)}))


def _nothing_found(model: nn.Module, reader: EventReader, recorder: Recorder) -> str:
    name = type(model).__name__
    if reader.without_weights:
        return (
            f"attention calls seen in {name} ({_some(reader.without_weights)}), but no floating-point weight feeds "
            "their queries; a quantised base without adapters has none: load it unquantised"
        )
    hidden = (
        f" {_some(recorder.unreadable)} use nn.MultiheadAttention, which hides them;" if recorder.unreadable else ""
    )
    return (
        f"no attention call seen in {name}: {recorder.num_softmaxes} softmax calls, none over a product of queries and "
        "keys of several tokens, and no call through an attention interface or scaled_dot_product_attention;"
        f"{hidden} load the "
        'model with attn_implementation="eager" (opaque kernels cannot be seen), or it has no softmax attention'
    )


def _notes(blocks: Iterable[ProbedBlock], reader: EventReader, recorder: Recorder) -> list[str]:
    notes = []
    selecting = [block.module for block in blocks if block.selectors]
    if selecting:
        notes.append(
            f"{_some(selecting)} select with top-k; a choice has no gradient, so the parameters under `selectors` may "
            "steer what is attended to without being listed"
        )
    if reader.not_over_tokens:
        notes.append(f"left out, softmax not over tokens: {_some(reader.not_over_tokens)}")
    if reader.skipped_modules:
        notes.append(f"left out, queries or keys do not depend on the tokens: {_some(reader.skipped_modules)}")
    if reader.without_weights:
        notes.append(f"left out, no weight of their layer feeds the queries: {_some(reader.without_weights)}")
    if reader.not_causal:
        notes.append(f"not causal, queries see later tokens: {_some(reader.not_causal)}")
    if recorder.opaque:
        notes.append(f"no softmax seen, reach taken from the mask alone: {_some(recorder.opaque)}")
    if recorder.unreadable:
        notes.append(f"nn.MultiheadAttention cannot be looked into, left out: {_some(recorder.unreadable)}")
    return notes


def _some(names: Iterable[str]) -> str:
    """The names in order, shortened to the first five."""
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more
