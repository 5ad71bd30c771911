"""Find where routing lives by differentiation, with no table of architectures: a forward pass on a few random tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.routes._capture import AttentionEvent, Recorder
from routeguard.routes._gradients import Findings, read_event
from routeguard.routes._probe_inputs import SLACK_TOKENS, longest_window, probe_inputs, run_model
from routeguard.routes._rows import Ranges, row_layout
from routeguard.routes._sandbox import sandbox

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
    """

    module: str
    layer: int | None
    global_attention: bool
    reach_tokens: int
    tensors: tuple[ProbedTensor, ...]


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


def probe_routes(
    model: nn.Module,
    *,
    input_ids: Tensor | None = None,
    num_tokens: int = 24,
    seed: int = 0,
    extra_inputs: Mapping[str, Any] | None = None,
) -> ProbeResult:
    """Find the parameter rows that feed queries, keys and values of every attention block, by autograd.

    Nothing of the model is changed: parameters are replaced by differentiable stand-ins during the pass, attention runs
    eagerly in evaluation mode, and everything is put back in `finally`.

    Args:
        model: a decoder with weights (not on the meta device) that takes `input_ids`.
        input_ids: [1, tokens] tokens to run; drawn at random, special tokens left out, by default.
        num_tokens: tokens to draw, default 24; raised to outgrow the attention windows of the configuration.
        seed: for the tokens and the random directions.
        extra_inputs: further arguments of the forward pass, for models that demand them.

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
    if num_tokens < 8:
        raise ValueError(f"num_tokens={num_tokens} is too short to tell a window from full attention; use at least 8")
    notes: list[str] = []
    inputs = probe_inputs(
        model, input_ids=input_ids, num_tokens=num_tokens, seed=seed, extra_inputs=extra_inputs, notes=notes
    )
    findings: dict[str, Findings] = {}
    generator = torch.Generator().manual_seed(seed)
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    with sandbox(model, seed=seed, max_window_tokens=longest_window(inputs)) as stand_ins:
        names = {id(parameter): name for name, parameter in stand_ins.items()}

        def on_layer(events: list[AttentionEvent], inputs: list[Tensor]) -> None:
            for event in events:
                read_event(model, event, inputs, names, findings, notes, generator)

        recorder = Recorder(model, on_layer)
        with recorder.watch():
            run_model(model, inputs)
        if not findings:
            raise ValueError(
                f"no attention call seen in {type(model).__name__}: {recorder.num_softmaxes} softmax calls, none over "
                "a product of queries and keys, and no call through an attention interface or "
                'scaled_dot_product_attention; load the model with attn_implementation="eager" (opaque kernels cannot '
                "be seen), or the model has no softmax attention"
            )
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = tuple(_block(name, found, order, modules) for name, found in findings.items())
        notes += _selection_notes(blocks, recorder.selections, modules, names)
    if recorder.num_opaque:
        notes.append(
            f"{recorder.num_opaque} attention calls showed no softmax: their reach is taken from the mask alone"
        )
    return ProbeResult(blocks=blocks, notes=tuple(dict.fromkeys(notes)))


def _block(name: str, found: Findings, order: dict[str, int], modules: dict[str, nn.Module]) -> ProbedBlock:
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    tensors = []
    for parameter in sorted(found.masks, key=order.__getitem__):
        masks = {role: mask for role, mask in found.masks[parameter].items() if bool(mask.any())}
        if masks:
            dim, ranges = row_layout(masks, modules.get(parameter.rpartition(".")[0]))
            rows = {f"{role}_rows": ranges.get(role, ()) for role in ROLES}
            tensors.append(ProbedTensor(parameter=parameter, dim=dim, **rows))
    return ProbedBlock(
        module=name,
        layer=int(number[1]) if number else None,
        global_attention=found.reach >= found.num_queries - 1 - SLACK_TOKENS,
        reach_tokens=found.reach,
        tensors=tuple(tensors),
    )


def _selection_notes(
    blocks: Iterable[ProbedBlock],
    selections: set[tuple[str, ...]],
    modules: dict[str, nn.Module],
    names: dict[int, str],
) -> list[str]:
    notes = []
    for block in blocks:
        inner = sorted({path[-1] for path in selections if block.module in path})
        if inner:
            listed = {tensor.parameter for tensor in block.tensors}
            unseen = sorted(
                {names[id(p)] for path in inner for p in modules[path].parameters() if id(p) in names} - listed
            )
            notes.append(
                f"'{block.module}' selects with top-k in {', '.join(inner)}: a choice has no gradient, so parameters that "
                f"steer it are not listed (unlisted there: {', '.join(unseen) or 'none'})"
            )
    return notes
