"""Which layers look less far back after fine-tuning, by the number of heads that shortened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeguard.diagnostics.distance import AttentionDistance
from routeguard.diagnostics.query_sample import mean_interval
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerChange:
    """How the heads of a layer changed from before to after.

    Attributes:
        layer: decoder layer index.
        shortened: heads whose mean distance is smaller after.
        surely_shortened: those among them whose interval of the paired difference lies below zero.
        num_heads: heads of the layer.
        before, after: mean distance of each head, tokens.
    """

    layer: int
    shortened: int
    surely_shortened: int
    num_heads: int
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def relative_change(self) -> float:
        """Change of the layer's mean distance, −0.2 for a fifth less."""
        return sum(self.after) / sum(self.before) - 1


@dataclass(frozen=True, eq=False)
class DistanceChange:
    """Attention distances of several states of one model, and the paper's ranking between the first two.

    Attributes:
        states: for example "before", "after" and "restored", in this order.
        ranking: layers by heads that shortened from the first state to the second, most first; ties by the change of
            the layer's mean distance.
    """

    states: Mapping[str, AttentionDistance]
    ranking: tuple[LayerChange, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "states": {name: distance.to_dict() for name, distance in self.states.items()},
            "ranking": [{**vars(change), "relative_change": change.relative_change} for change in self.ranking],
        }

    def __str__(self) -> str:
        names = list(self.states)
        first = next(iter(self.states.values()))
        lines = [
            f"layers by heads that look less far back {names[1]} than {names[0]} "
            f"({first.num_sequences} × {first.sample.num_tokens} tokens; sure: paired {first.confidence:.0%} interval)",
            f"{'layer':>5}  {'shortened':>9}  {'sure':>4}  " + "  ".join(f"{name:>10}" for name in names) + "  change",
        ]
        for change in self.ranking:
            means = (sum(state.mean(change.layer)) / change.num_heads for state in self.states.values())
            lines.append(
                f"{change.layer:>5}  {f'{change.shortened}/{change.num_heads}':>9}  {change.surely_shortened:>4}  "
                + "  ".join(f"{mean:>10.1f}" for mean in means)
                + f"  {change.relative_change:+.1%}"
            )
        return "\n".join(lines)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """Every head in every state; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.diagnostics.distance_plot import plot_distances

        return plot_distances(self.states, path)


def distance_change(states: Mapping[str, AttentionDistance]) -> DistanceChange:
    """Compare attention distances measured on the same tokens with the same seed, and rank the layers.

    Args:
        states: two or more, by name; the first is the reference, the second is ranked against it.

    Raises:
        ValueError: fewer than two, or other layers, heads or queries.

    Source: paper, layers ranked by how many heads shorten after fine-tuning; the paired interval is ours.
    """
    if len(states) < 2:
        raise ValueError(f"a change needs two states or more, given: {list(states)}")
    (_, before), *others = states.items()
    for name, other in others:
        same_shapes = {k: v.shape for k, v in before.values.items()} == {k: v.shape for k, v in other.values.items()}
        if other.sample != before.sample or not same_shapes:
            raise ValueError(f"state {name!r} was measured on other queries or layers; measure all with the same call")
    after = others[0][1]
    changes = []
    for layer in before.values:
        paired = mean_interval(after.values[layer] - before.values[layer], before.sample, confidence=before.confidence)
        changes.append(
            LayerChange(
                layer=layer,
                shortened=int((paired.mean < 0).sum()),
                surely_shortened=int((paired.high < 0).sum()),
                num_heads=len(paired.mean),
                before=before.mean(layer),
                after=after.mean(layer),
            )
        )
    changes.sort(key=lambda change: (-change.shortened, change.relative_change))
    return DistanceChange(dict(states), tuple(changes))
