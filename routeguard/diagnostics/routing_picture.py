"""Routing of one head as a picture: where each token looks, before, after and restored, and what restoring changed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.diagnostics.attention_rows import attention_rows
from routeguard.diagnostics.capture import captured_calls
from routeguard.diagnostics.running import (
    chosen_attention,
    over_tokens,
    quiet,
    require_seen,
    run_tokens,
)
from routeguard.recall.model_config import refuse_beyond_positions
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
NUM_CELLS = 256


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention probabilities of one head, averaged over cells of neighbouring tokens.

    Attributes:
        layer, head: which head.
        num_tokens: length T of the prompt.
        values: [cells, cells], mean probability of the query-key pairs in a cell; row: query, column: key. Cells of one
            token (T at most the number of cells asked for) are the attention matrix itself.
        last_query: [T], what the last token gives to each token: in a prompt that ends where the answer begins, the
            attention that decides about it.
    """

    layer: int
    head: int
    num_tokens: int
    values: Tensor
    last_query: Tensor

    @property
    def edges(self) -> list[int]:
        """First token of each cell, and T."""
        return _edges(self.num_tokens, len(self.values))


@dataclass(frozen=True, eq=False)
class RoutingPicture:
    """Maps of one head in several states of a model, on the same prompt.

    Attributes:
        states: maps by name; with "after" and "restored" among them the picture has a panel of their log-ratio.
        marks: tokens worth a mark, from start to stop, by name (the needle, say).
    """

    states: Mapping[str, AttentionMap]
    marks: Mapping[str, tuple[int, int]]

    @property
    def log_ratio(self) -> Tensor | None:
        """`log(restored / after)` cell by cell, nan where neither attends; None without the two states."""
        if not {"after", "restored"} <= self.states.keys():
            return None
        after, restored = self.states["after"].values, self.states["restored"].values
        least = torch.finfo(torch.float32).tiny
        ratio = (restored.clamp_min(least) / after.clamp_min(least)).log()
        return torch.where((after > 0) | (restored > 0), ratio, torch.nan)

    def received(self, state: str, mark: str) -> float:
        """Share of its attention that the last token gives to the marked tokens, 0 to 1."""
        return float(self.states[state].last_query[slice(*self.marks[mark])].sum())

    def to_dict(self) -> dict[str, Any]:
        first = next(iter(self.states.values()))
        ratio = self.log_ratio
        return {
            "schema_version": SCHEMA_VERSION,
            "layer": first.layer,
            "head": first.head,
            "num_tokens": first.num_tokens,
            "marks": {name: list(span) for name, span in self.marks.items()},
            "received": {mark: {state: self.received(state, mark) for state in self.states} for mark in self.marks},
            "states": {name: state.values.tolist() for name, state in self.states.items()},
            "last_query": {name: state.last_query.tolist() for name, state in self.states.items()},
            "log_ratio": None if ratio is None else [[None if v != v else v for v in row] for row in ratio.tolist()],
        }

    def __str__(self) -> str:
        first = next(iter(self.states.values()))
        lines = [f"layer {first.layer}, head {first.head}, {first.num_tokens} tokens, {len(first.values)} cells a side"]
        for mark, (start, stop) in self.marks.items():
            shares = ", ".join(f"{state} {self.received(state, mark):.3f}".lstrip() for state in self.states)
            where = f"token {start}" if stop == start + 1 else f"tokens {start} to {stop - 1}"
            lines.append(f"attention of the last token to {mark} ({where}): {shares}")
        ratio = self.log_ratio
        if ratio is not None:
            known = ratio[~ratio.isnan()]
            lines.append(
                f"log(restored / after): median {float(known.median()):+.2f}, largest {float(known.max()):+.2f}"
            )
        return "\n".join(lines)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """One panel a state and the log-ratio; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.diagnostics.routing_plot import plot_routing

        return plot_routing(self, path)


def attention_map(
    model: nn.Module, input_ids: Tensor, *, layer: int, head: int, num_cells: int = NUM_CELLS, insist: bool = False
) -> AttentionMap:
    """Compute the attention of one head, averaged over cells, without a T × T matrix.

    Args:
        model: a causal language model.
        input_ids: [1, tokens].
        layer: a full-attention layer.
        head: query head, from 0.
        num_cells: cells a side at most, default 256. Memory is O(tokens² / num_cells).
        insist: measure beyond the positions that the model's configuration names.

    Raises:
        ValueError: no such layer or head, more than one sequence, attention that cannot be seen, or more tokens than
            the model has positions.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"a routing picture is of one prompt, [1, tokens]; got {tuple(input_ids.shape)}")
    tokens = int(input_ids.shape[1])
    if not insist:
        refuse_beyond_positions(model, tokens)
    cells = min(num_cells, tokens)
    found: list[tuple[Tensor, Tensor]] = []

    def visit(call: AttentionCall, _: Tensor | None) -> None:
        if over_tokens(call, tokens):
            if not 0 <= head < call.num_heads:
                raise ValueError(f"layer {layer} has heads 0 to {call.num_heads - 1}, asked for {head}")
            found.append(_cells(one_head(call, head), cells))

    attention = chosen_attention(model, [layer])
    with torch.no_grad(), quiet(model), captured_calls(model, attention, visit):
        run_tokens(model, input_ids)
    require_seen([layer], [layer] if found else [])
    return AttentionMap(layer, head, tokens, *found[0])


def routing_picture(
    states: Mapping[str, AttentionMap], *, marks: Mapping[str, int | tuple[int, int]] | None = None
) -> RoutingPicture:
    """Put maps of the same head and prompt side by side: the paper's Fig. 4 with "before", "after" and "restored".

    Args:
        states: maps by name, one or more.
        marks: tokens to mark, by name: one, or (start, stop). `needle_prompt` makes a prompt with its marks.

    Raises:
        ValueError: no map, maps of other heads or lengths, or a mark outside of the prompt.

    Source: paper, Fig. 4 (before, after, restored, and the log-ratio of restored and after; element by element there,
    cell by cell here).
    """
    if not states:
        raise ValueError("a routing picture needs at least one map")
    kinds = {(state.layer, state.head, state.num_tokens, len(state.values)) for state in states.values()}
    if len(kinds) > 1:
        raise ValueError(f"the maps differ in (layer, head, tokens, cells): {sorted(kinds)}")
    tokens = next(iter(states.values())).num_tokens
    spans = {name: (mark, mark + 1) if isinstance(mark, int) else mark for name, mark in (marks or {}).items()}
    outside = {name: span for name, span in spans.items() if not 0 <= span[0] < span[1] <= tokens}
    if outside:
        raise ValueError(f"marks outside of the {tokens} tokens, or empty: {outside}")
    return RoutingPicture(dict(states), spans)


def one_head(call: AttentionCall, head: int) -> AttentionCall:
    """The same call with one query head and its key head."""

    def of_head(part: Tensor | None) -> Tensor | None:
        return part if part is None or part.dim() < 4 or part.shape[1] == 1 else part[:, head : head + 1]

    if call.probabilities is not None:
        return replace(call, probabilities=call.probabilities[:, head : head + 1])
    key_head = head // (call.num_heads // call.key.shape[1])
    sinks = call.sinks
    return replace(
        call,
        query=call.query[:, head : head + 1],
        key=call.key[:, key_head : key_head + 1],
        value=call.value[:, key_head : key_head + 1],
        sinks=of_head(sinks) if sinks is None or sinks.dim() == 4 else sinks.flatten()[head : head + 1],
        bias=of_head(call.bias),
        mask=of_head(call.mask),
    )


def _cells(call: AttentionCall, cells: int) -> tuple[Tensor, Tensor]:
    """Means over cells, [cells, cells], and the last query's row, [T]."""
    edges = _edges(call.num_keys, cells)
    widths = torch.tensor([stop - start for start, stop in itertools.pairwise(edges)])
    owner = torch.repeat_interleave(torch.arange(cells), widths)
    rows = []
    for start, stop in itertools.pairwise(edges):
        exact = attention_rows(call, list(range(start, stop)))[0, 0].cpu()
        rows.append(torch.zeros(cells).index_add_(0, owner, exact.mean(0)) / widths)
    return torch.stack(rows), exact[-1].clone()


def _edges(tokens: int, cells: int) -> list[int]:
    return [round(number * tokens / cells) for number in range(cells + 1)]
