"""Draw what the two state-transition examples measured.

    python examples/state_transition_plots.py FOLDER

FOLDER holds chains.json (results.json of examples/state_transition.py) or traces.json (that of
examples/state_transition_real.py), or both; pictures are written beside them. Needs routeguard[plots].
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeguard.plots import COLOURS, finish, new_figure, tidy

# Method, label, colour, and the line's kind.
CHAIN_METHODS = (
    ("base, full attention", "base, full attention", COLOURS[6], "-"),
    ("base, sinks and a window, as many bytes", "base, sinks and window, same bytes", COLOURS[4], "-"),
    ("base, heavy hitters and a window, as many bytes", "base, heavy hitters, same bytes", COLOURS[2], "-"),
    ("base, heavy hitters and a window, as many keys", "base, heavy hitters, a third of them", COLOURS[2], ":"),
    ("attention to the step only, step tokens trained", "attention to the step only", COLOURS[7], "--"),
    ("state transition", "state transition", COLOURS[1], "-"),
)
ABLATIONS = (
    "state transition",
    "without the gate",
    "without momentum",
    "momentum as printed (max)",
    "without distillation",
    "one pattern",
    "reads not normalised",
    "features as they are",
)
TRACE_METHODS = (
    ("base, full attention", COLOURS[6], "-"),
    ("base, sinks and a window", COLOURS[4], "-"),
    ("base, heavy hitters and a window", COLOURS[2], "-"),
    ("base, attention to the step only", COLOURS[7], "--"),
    ("LoRA, full attention", COLOURS[0], "-"),
    ("LoRA, attention to the step only", COLOURS[0], "--"),
    ("state transition", COLOURS[1], "-"),
    ("state transition, finished steps forgotten", COLOURS[1], "--"),
)


def draw_chains(results: dict[str, Any], path: Path) -> None:
    """Share of sums right, bytes held and time a token, by sums in the chain."""
    figure, axes = new_figure(1, 3, width=11, height=4.2)
    accuracy, held, time = axes
    for name, label, colour, style in CHAIN_METHODS:
        method = results["methods"].get(name, {})
        line = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4, "label": label}
        for panel, values in (
            (accuracy, method.get("accuracy", {})),
            (held, _sum(method.get("kv_bytes", {}), method.get("state_bytes", {}))),
            (time, method.get("ms_per_token", {})),
        ):
            if values:
                panel.plot([int(n) for n in values], list(values.values()), **line)
    accuracy.axhline(0.1, color=COLOURS[7], linewidth=0.8)
    accuracy.annotate("chance", (4, 0.1), xytext=(0, 3), textcoords="offset points", fontsize=8, color=COLOURS[7])
    accuracy.set_ylim(0, 1.03)
    held.set_yscale("log")
    time.set_ylim(bottom=0)
    for panel, title in (
        (accuracy, "share of sums right"),
        (held, "bytes of keys, values and states"),
        (time, "processor time a token, ms"),
    ):
        panel.set_xscale("log", base=2)
        sums = [int(n) for n in next(iter(results["methods"].values()))["accuracy"]]
        panel.set_xticks(sums, [str(n) for n in sums])
        panel.minorticks_off()
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("sums in the chain")
        tidy(panel)
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    finish(figure, path)


def draw_ablations(results: dict[str, Any], path: Path) -> None:
    """Share of sums right without one thing each."""
    methods = {name: results["methods"][name]["accuracy"] for name in ABLATIONS if name in results["methods"]}
    sums = list(next(iter(methods.values())))
    figure, axes = new_figure(width=8, height=0.45 * len(methods) + 1.3)
    thickness = 0.8 / len(sums)
    for number, n in enumerate(sums):
        places = [row + number * thickness for row in range(len(methods))]
        axes.barh(
            places, [accuracy[n] for accuracy in methods.values()], thickness, color=COLOURS[number], label=f"{n} sums"
        )
    axes.set_yticks([row + 0.4 - thickness / 2 for row in range(len(methods))], list(methods))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of sums right")
    tidy(axes, grid="x")
    figure.legend(loc="outside lower center", ncols=len(sums), frameon=False, fontsize=9)
    finish(figure, path)


def draw_traces(results: dict[str, Any], path: Path) -> None:
    """Loss on held-out traces: by steps of the trace, and by the step that a word stands in."""
    figure, axes = new_figure(1, 2, width=10, height=4.6, sharey=True)
    for panel, kind, label in (
        (axes[0], "trace_steps", "steps of the trace"),
        (axes[1], "in_step", "step of the word"),
    ):
        for name, colour, style in TRACE_METHODS:
            values = results["methods"].get(name, {}).get("loss", {}).get(kind, {})
            line = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4, "label": name}
            if values:
                panel.plot(list(values), list(values.values()), **line)
        panel.set_xlabel(label)
        tidy(panel)
    axes[0].set_ylabel("loss, nats a token")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    finish(figure, path)


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {n: one[n] + other.get(n, 0) for n in one}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    chains, traces = folder / "chains.json", folder / "traces.json"
    if not (chains.is_file() or traces.is_file()):
        parser.error(f"{folder} holds neither chains.json nor traces.json")
    if chains.is_file():
        results = json.loads(chains.read_text(encoding="utf-8"))
        draw_chains(results, folder / "chains.png")
        draw_ablations(results, folder / "ablations.png")
    if traces.is_file():
        draw_traces(json.loads(traces.read_text(encoding="utf-8")), folder / "traces.png")


if __name__ == "__main__":
    main()
