"""Check a probe by a second method that shares no gradient with it: noise on rows, and look at the attention logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from routeguard.routes._capture import AttentionEvent, Recorder
from routeguard.routes._probe_inputs import longest_window, probe_inputs, run_model
from routeguard.routes._sandbox import sandbox
from routeguard.routes.probe import ProbedBlock, ProbeResult


@dataclass(frozen=True)
class PerturbationReport:
    """What noise did to the attention logits.

    Attributes:
        num_blocks: blocks checked.
        num_rows: listed rows that were moved one at a time.
        leaks: parameters with unlisted rows that move the logits, as "module: parameter".
        steering: selectors of a block that move the logits, by another choice of keys or experts, as expected.
        inert: listed rows that do not move the logits, as "module: parameter row n".
        unchecked: blocks whose module could not be run alone, with the reason.
    """

    num_blocks: int
    num_rows: int
    leaks: tuple[str, ...]
    steering: tuple[str, ...]
    inert: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether every block was checked and nothing contradicts the probe."""
        return not (self.leaks or self.inert or self.unchecked)


def perturbation_check(
    model: nn.Module,
    result: ProbeResult,
    *,
    input_ids: Tensor | None = None,
    num_tokens: int = 24,
    rows_per_range: int = 3,
    seed: int = 0,
    extra_inputs: Mapping[str, Any] | None = None,
    entry: str = "",
) -> PerturbationReport:
    """Compare `result` with what noise on single rows does to the masked logits of each block.

    Each block's module is run alone on the input that it gets in the model. Noise on every row that is listed neither
    as query nor as key nor as bias must leave the logits exactly unchanged, in one go; noise on single listed rows must
    change them. The model is left as it was.

    Args:
        model: the probed model.
        result: of `probe_routes(model)`.
        input_ids, num_tokens, seed, extra_inputs, entry: as for `probe_routes`.
        rows_per_range: how many rows of each listed range to try, spread from its first to its last, default 3.

    Source: derived.
    """
    leaks: list[str] = []
    steering: list[str] = []
    inert: list[str] = []
    unchecked: list[str] = []
    num_rows = 0
    runner = model.get_submodule(entry)
    inputs = probe_inputs(
        runner, input_ids=input_ids, num_tokens=num_tokens, seed=seed, extra_inputs=extra_inputs, notes=[]
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with sandbox(model, seed=seed, max_window_tokens=longest_window(inputs)) as stand_ins:
        calls = _inputs_of(model, runner, {block.module for block in result.blocks}, inputs)
        for block in result.blocks:
            if block.module not in calls:
                unchecked.append(f"{block.module}: did not run")
                continue
            module, call = model.get_submodule(block.module), calls[block.module]

            def logits(module: nn.Module = module, call: _Call = call) -> list[Tensor]:
                return _logits(module, call)

            base = logits()
            if not base or not _same(base, logits()):
                unchecked.append(f"{block.module}: logits not seen, or not the same in two runs")
                continue
            listed, unlisted = _split(block, module, stand_ins)
            with _Noise(unlisted, generator):
                moved = not _same(base, logits())
            if moved:  # look for the culprit
                for name, (parameter, rows) in unlisted.items():
                    with _Noise({name: (parameter, rows)}, generator):
                        if not _same(base, logits()):
                            (steering if name in block.selectors else leaks).append(f"{block.module}: {name}")
            for name, dim, row in _sample(block, rows_per_range):
                num_rows += 1
                selected = torch.zeros_like(listed[name], dtype=torch.bool)
                if selected.dim():
                    selected.select(dim, row).fill_(True)
                else:
                    selected.fill_(True)
                with _Noise({name: (listed[name], selected)}, generator):
                    if _same(base, logits()):
                        inert.append(f"{block.module}: {name} row {row}")
    return PerturbationReport(
        num_blocks=len(result.blocks),
        num_rows=num_rows,
        leaks=tuple(leaks),
        steering=tuple(steering),
        inert=tuple(inert),
        unchecked=tuple(unchecked),
    )


_Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Noise:
    """Adds noise to selected entries of stand-in parameters, in fresh memory, and takes it away again."""

    def __init__(self, entries: dict[str, tuple[nn.Parameter, Tensor]], generator: torch.Generator) -> None:
        self._entries, self._generator = entries, generator
        self._old: list[tuple[nn.Parameter, Tensor]] = []

    def __enter__(self) -> None:
        for parameter, selected in self._entries.values():
            self._old.append((parameter, parameter.data))
            scale = max(float(parameter.detach().float().abs().mean()), 0.01)
            noise = (torch.randn(parameter.shape, generator=self._generator) * scale + scale).to(parameter)
            parameter.data = torch.where(selected, parameter.data + noise, parameter.data)

    def __exit__(self, *_: object) -> None:
        for parameter, data in self._old:
            parameter.data = data


def _inputs_of(model: nn.Module, runner: nn.Module, wanted: set[str], inputs: dict[str, Any]) -> dict[str, _Call]:
    """The arguments of the first call of each wanted module, by its name on the call path."""
    calls: dict[str, _Call] = {}
    recorder = Recorder(model, lambda events, leaves: None)

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = recorder.path[-1] if recorder.path else ""
        if name in wanted and name not in calls:
            calls[name] = _copied(args), _copied(kwargs)

    with recorder.watch():
        handles = [model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True) for name in wanted]
        try:
            run_model(runner, inputs)
        finally:
            for handle in handles:
                handle.remove()
    return calls


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return value


def _logits(module: nn.Module, call: _Call) -> list[Tensor]:
    """The masked logits of every attention call of `module`, in order."""
    seen: list[Tensor] = []

    def read(events: list[AttentionEvent], inputs: list[Tensor]) -> None:
        for event in events:
            if event.logits is not None:
                seen.append(event.logits.detach().clone())
                continue
            for query, key in zip(event.queries, event.keys, strict=True):
                groups = query.shape[-3] // key.shape[-3]
                product = query @ key.repeat_interleave(groups, dim=-3).transpose(-1, -2)
                if event.mask is not None and event.mask.is_floating_point():
                    product = product + event.mask
                seen.append(product.detach())

    recorder = Recorder(module, read)
    args, kwargs = _copied(call[0]), _with_gradients(_copied(call[1]))
    with recorder.watch():
        module(*_with_gradients(args), **kwargs)
    return seen


def _with_gradients(value: Any) -> Any:
    """Float tensors as graph nodes, which the recorder needs to recognise attention that is written out by hand."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.requires_grad_(True).clone()
    if type(value) in (tuple, list):
        return type(value)(_with_gradients(item) for item in value)
    if type(value) is dict:
        return {key: _with_gradients(item) for key, item in value.items()}
    return value


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _split(
    block: ProbedBlock, module: nn.Module, stand_ins: dict[str, nn.Parameter]
) -> tuple[dict[str, nn.Parameter], dict[str, tuple[nn.Parameter, Tensor]]]:
    """The listed parameters, and every unlisted entry of the module's parameters."""
    tensors = {tensor.parameter: tensor for tensor in block.tensors}
    inside = {id(parameter) for parameter in module.parameters()}
    listed: dict[str, nn.Parameter] = {}
    unlisted: dict[str, tuple[nn.Parameter, Tensor]] = {}
    for name, parameter in stand_ins.items():
        if id(parameter) not in inside:
            continue
        free = torch.ones_like(parameter, dtype=torch.bool)
        if name in tensors:
            tensor = tensors[name]
            for start, stop in (*tensor.query_rows, *tensor.key_rows, *tensor.bias_rows):
                if free.dim():
                    free.narrow(tensor.dim, start, stop - start).fill_(False)
                else:
                    free.fill_(False)
            listed[name] = parameter
        if bool(free.any()):
            unlisted[name] = parameter, free
    return listed, unlisted


def _sample(block: ProbedBlock, rows_per_range: int) -> list[tuple[str, int, int]]:
    picks: dict[tuple[str, int, int], None] = {}
    for tensor in block.tensors:
        for start, stop in (*tensor.query_rows, *tensor.key_rows, *tensor.bias_rows):
            for step in range(rows_per_range):
                row = start + round(step * (stop - 1 - start) / max(rows_per_range - 1, 1))
                picks[tensor.parameter, tensor.dim, row] = None
    return list(picks)
