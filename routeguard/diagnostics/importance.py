"""Which attention layers and heads carry a score: leave each one out and measure again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.diagnostics.capture import attention_module, captured_calls
from routeguard.diagnostics.running import chosen_attention, quiet
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1

Score = Callable[[nn.Module], "float | Mapping[str, float]"]


@dataclass(frozen=True)
class Importance:
    """Importance of one layer, or of one head of it.

    Attributes:
        layer, head: what was left out; head is None for the whole layer.
        scores: what the model scored without it, by task.
        importance: mean over tasks of the full score minus these.
    """

    layer: int
    head: int | None
    scores: Mapping[str, float]
    importance: float

    @property
    def name(self) -> str:
        return f"layer {self.layer}" if self.head is None else f"layer {self.layer} head {self.head}"


@dataclass(frozen=True)
class ImportanceRanking:
    """Layers or heads, the most important first.

    Attributes:
        full: score of the whole model, by task.
        ranking: most important first.
    """

    full: Mapping[str, float]
    ranking: tuple[Importance, ...]

    def top(self, count: int) -> tuple[int, ...]:
        """The layers of the first `count` entries, each once, for `find_routes(model, layers=ranking.top(3))`.

        Raises ValueError for a count that is not between 1 and the number of entries.
        """
        if not 1 <= count <= len(self.ranking):
            raise ValueError(f"top {count} of {len(self.ranking)} asked for")
        return tuple(sorted({entry.layer for entry in self.ranking[:count]}))

    def top_heads(self, count: int) -> dict[int, tuple[int, ...]]:
        """Layer to its heads among the first `count` entries of a ranking of heads."""
        self.top(count)
        found: dict[int, list[int]] = {}
        for entry in self.ranking[:count]:
            if entry.head is None:
                raise ValueError("this ranking is of whole layers; use head_importance for heads")
            found.setdefault(entry.layer, []).append(entry.head)
        return {layer: tuple(sorted(found[layer])) for layer in sorted(found)}

    def to_dict(self) -> dict[str, Any]:
        ranking = [{**vars(entry)} for entry in self.ranking]
        return {"schema_version": SCHEMA_VERSION, "full": dict(self.full), "ranking": ranking}

    def __str__(self) -> str:
        tasks = list(self.full)
        width = max(len(entry.name) for entry in self.ranking)
        lines = [f"{'left out':<{width}}  importance  " + "  ".join(f"{task:>8}" for task in tasks)]
        lines.append(f"{'nothing':<{width}}  {'':>10}  " + "  ".join(f"{self.full[task]:>8.3f}" for task in tasks))
        for entry in self.ranking:
            scores = "  ".join(f"{entry.scores[task]:>8.3f}" for task in tasks)
            lines.append(f"{entry.name:<{width}}  {entry.importance:>+10.3f}  {scores}")
        return "\n".join(lines)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """Bars, most important first; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.plots import COLOURS, finish, new_figure, tidy

        shown = self.ranking[:40]
        figure, axes = new_figure(width=6.4, height=max(1.8, 0.24 * len(shown) + 1.1))
        rows = range(len(shown))
        values = [entry.importance for entry in shown]
        axes.barh(rows, values, color=COLOURS[0], height=0.7)
        axes.set_yticks(rows, [entry.name for entry in shown], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlim(min(-0.05, 1.1 * min(values)), max(0.1, 1.1 * max(values)))  # nothing is made to look like much
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel("score lost without it")
        mean = sum(self.full.values()) / len(self.full)
        axes.set_title(f"Importance (the whole model scores {mean:.2f})", fontsize=10, loc="left")
        tidy(axes, grid="x")
        return finish(figure, path)


def layer_importance(model: nn.Module, score: Score, *, layers: Iterable[int] | None = None) -> ImportanceRanking:
    """Leave each full-attention layer's attention out in turn (its block adds nothing to the stream) and score again.

    Args:
        model: a causal language model; its weights are not touched.
        score: from the model to a number, higher is better, or to several by task (recall tasks, say). Called once for
            the whole model and once for each layer.
        layers: decoder layer indices. Default: every full-attention layer.

    Raises:
        ValueError: no full-attention layer, scores of no task or of other tasks than for the whole model.

    Source: paper, App. M (leave-one-out, mean retrieval accuracy over tasks, restore only the top k).
    """
    attention = chosen_attention(model, layers)
    by_layer: dict[int, list[nn.Module]] = {}
    for geometry in attention:
        by_layer.setdefault(geometry.layer, []).append(attention_module(model, geometry))
    if len({id(module) for modules in by_layer.values() for module in modules}) < len(attention):
        raise ValueError("layers share one attention module, so that one cannot be left out alone; use head_importance")
    with quiet(model):
        full = _scores(score, model)
        entries = []
        for layer, modules in by_layer.items():
            with _silenced(modules):
                entries.append(_entry(layer, None, full, _scores(score, model)))
    return _ranked(full, entries)


def head_importance(model: nn.Module, score: Score, *, layers: Iterable[int] | None = None) -> ImportanceRanking:
    """Leave each head of the full-attention layers out in turn: zeros in the place of what it brings back.

    Costs one call of `score` a head. Args, errors and source as for `layer_importance`; a layer's attention must go
    through an attention function (eager or SDPA).
    """
    attention = chosen_attention(model, layers)
    with quiet(model):
        full = _scores(score, model)
        entries = []
        for geometry in attention:
            for head in range(geometry.num_heads):
                with _without_head(model, attention, geometry.layer, head):
                    entries.append(_entry(geometry.layer, head, full, _scores(score, model)))
    return _ranked(full, entries)


@contextmanager
def _silenced(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules return zeros in the place of their first output."""

    def silence(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    handles = [module.register_forward_hook(silence) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_head(model: nn.Module, attention: Iterable[Any], layer: int, head: int) -> Iterator[None]:
    touched = False

    def visit(call: AttentionCall, result: Tensor | None) -> Tensor | None:
        nonlocal touched
        if call.layer != layer or result is None:
            return None
        touched = True
        silenced = result.clone()
        silenced[:, head] = 0
        return silenced

    with captured_calls(model, attention, visit):
        yield
    if not touched:
        raise ValueError(
            f"the attention function of layer {layer} was not seen, so its heads cannot be left out; load the "
            'model with attn_implementation="sdpa" or "eager"'
        )


def _scores(score: Score, model: nn.Module) -> dict[str, float]:
    found = score(model)
    scores = dict(found) if isinstance(found, Mapping) else {"score": float(found)}
    if not scores:
        raise ValueError("the score function gave no task")
    return scores


def _entry(layer: int, head: int | None, full: Mapping[str, float], scores: Mapping[str, float]) -> Importance:
    if scores.keys() != full.keys():
        raise ValueError(f"the score function gave {list(scores)} where it gave {list(full)} for the whole model")
    lost = sum(full[task] - scores[task] for task in full) / len(full)
    return Importance(layer, head, scores, lost)


def _ranked(full: Mapping[str, float], entries: list[Importance]) -> ImportanceRanking:
    return ImportanceRanking(full, tuple(sorted(entries, key=lambda entry: -entry.importance)))
