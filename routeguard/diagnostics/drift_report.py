"""The drift record of a run as tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeguard.drift.record import read_drift
from routeguard.drift.sample import DriftSample
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DriftReport:
    """Drift of a run.

    Attributes:
        path: the file read.
        header: what the run wrote about itself.
        samples: one a step, `‖W − W₀‖/‖W₀‖` by layer and role; at log steps also the logit form of every head.
    """

    path: Path
    header: Mapping[str, Any]
    samples: tuple[DriftSample, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _ in self.samples[-1].factors}))

    @property
    def last_routing(self) -> DriftSample | None:
        """The last sample that holds the logit form, or None."""
        return next((sample for sample in reversed(self.samples) if sample.routing), None)

    def series(self, layer: int, role: str) -> tuple[list[int], list[float]]:
        """Steps and drift of one layer and role. Raises ValueError where there is none."""
        points = [(s.step, s.factors[layer, role]) for s in self.samples if (layer, role) in s.factors]
        if not points:
            known = sorted(self.samples[-1].factors)
            raise ValueError(f"no drift of layer {layer}, role {role!r} in {self.path}; there are {known}")
        steps, values = zip(*points, strict=True)
        return list(steps), list(values)

    def to_dict(self) -> dict[str, Any]:
        last, routing = self.samples[-1], self.last_routing
        return {
            "schema_version": SCHEMA_VERSION,
            "path": str(self.path),
            "header": dict(self.header),
            "num_samples": len(self.samples),
            "last_step": last.step,
            "drift": [{"layer": n, "role": role, "drift": value} for (n, role), value in last.factors.items()],
            "routing_step": None if routing is None else routing.step,
            "routing": {} if routing is None else {str(n): list(heads) for n, heads in routing.routing.items()},
        }

    def __str__(self) -> str:
        last, routing = self.samples[-1], self.last_routing
        lines = [f"{self.path}: {len(self.samples)} steps, the last is {last.step}; relative drift there"]
        for layer in self.layers:
            parts = [f"{role} {value:.4f}" for (number, role), value in last.factors.items() if number == layer]
            if routing is not None and layer in routing.routing:
                heads = routing.routing[layer]
                parts.append(f"logit form of {len(heads)} heads {min(heads):.4f} to {max(heads):.4f}")
            lines.append(f"  layer {layer:>3}  {',  '.join(parts)}")
        return "\n".join(lines)

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """Drift over steps, and the logit form by head; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.plots import COLOURS, finish, new_figure, tidy

        routing = self.last_routing
        columns = 1 if routing is None else 2
        figure, grid = new_figure(1, columns, width=5.6 * columns, height=3.8, squeeze=False)
        axes = grid[0][0]
        few = len(self.layers) <= len(COLOURS)
        for number, layer in enumerate(self.layers):
            for role, style in (("query", "-"), ("key", "--")):
                if (layer, role) in self.samples[-1].factors:
                    label = f"layer {layer} {role}" if few else None
                    axes.plot(*self.series(layer, role), style, color=COLOURS[number % len(COLOURS)], label=label)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("‖W − W₀‖ / ‖W₀‖")
        axes.set_title("Queries (solid) and keys (dashed)", fontsize=10, loc="left")
        axes.set_ylim(bottom=0)
        if few:
            axes.legend(frameon=False, fontsize=8)
        tidy(axes)
        if routing is not None:
            _draw_heads(grid[0][1], routing)
        return finish(figure, path)


def drift_report(run: str | Path) -> DriftReport:
    """Read the drift record of a run.

    Args:
        run: a `drift.jsonl`, or a folder that holds one or whose folder `routeguard` does (a trainer's output folder).

    Raises:
        ValueError: no such file, one that is damaged or without samples, or of another schema version.
    """
    given = Path(run)
    places = [given] if given.is_file() else [given / "drift.jsonl", *sorted(given.glob("*/drift.jsonl"))]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(
            f"no drift.jsonl at {given} or one folder below; RouteGuard writes it while a run goes on. To compare two "
            "checkpoints: `routeguard drift BASE TUNED`"
        )
    try:
        header, samples = read_drift(found) if found.stat().st_size else ({}, [])
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError) as error:
        raise ValueError(f"{found} is damaged or no drift record: {error}") from None
    if not samples:
        raise ValueError(f"{found} holds no step yet")
    return DriftReport(found, header, tuple(samples))


def _draw_heads(axes: Any, sample: DriftSample) -> None:
    """One row a layer, one cell a head."""
    from routeguard.plots import GREY

    layers = sorted(sample.routing)
    widest = max(len(sample.routing[layer]) for layer in layers)
    rows = [[*sample.routing[layer], *[float("nan")] * (widest - len(sample.routing[layer]))] for layer in layers]
    image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xticks(range(0, widest, 1 if widest <= 16 else 4))
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    axes.set_facecolor(GREY)
    axes.set_title(f"Drift of the logit form, step {sample.step}", fontsize=10, loc="left")
    axes.figure.colorbar(image, ax=axes, pad=0.02)
