"""What the guard costs a process of a large sharded run, by formula, on models built on the meta device.

    python -m benchmarks.scale              # 7B to 1T parameters, FSDP2 and ZeRO, 8 to 1024 devices
    python -m benchmarks.scale --markdown   # the table of docs/scale.md

Nothing is trained and nothing is timed: shapes and held rows are those of the models, the rest is arithmetic
(`_rank_memory.py`; tests/test_scale.py compares it with what the real objects hold). Of the processes of a run, the
one that holds most is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks._rank_memory import (
    Engine,
    Mode,
    capture_peak,
    log_traffic,
    queue_bytes,
    sidecar_bytes,
    start_bytes,
    start_traffic,
    state_bytes,
)
from benchmarks._scale_models import MODELS, ScaleModel, describe

DEVICES = (8, 64, 256, 1024)
LOG_STEPS = 10  # steps between log lines, TRL's default
DEVICE_MEMORY = 80 * 2**30
MODES: tuple[Mode, ...] = ("freeze", "track", "low_lr", "anchor")
COLUMNS = (
    "engine", "devices", "states, GiB", "freeze, MiB", "share", "other modes, MiB", "share", "peak at start, MiB",
    "received at start, GiB", "sent a log line, KiB",
)  # fmt: skip


def engines_for(model: ScaleModel) -> tuple[Engine, ...]:
    """ZeRO-1 and 2 keep all 16-bit parameters in every process, so only small models run there."""
    return ("FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3") if model.routes.num_model_parameters < 2e10 else ("FSDP2", "ZeRO-3")


def own_bytes(model: ScaleModel, mode: Mode, engine: Engine, devices: int, *, steps: int = LOG_STEPS) -> int:
    """What the guard keeps on the device of the process where it keeps most: the start, and drift that waits."""
    start = int(start_bytes(model.tensors, mode, engine, devices).max())
    return start + (0 if mode == "freeze" else queue_bytes(model.num_cells, steps))


def share_of_states(model: ScaleModel, mode: Mode, engine: Engine, devices: int, *, steps: int = LOG_STEPS) -> float:
    """`own_bytes` as a share of what a process holds on average of parameters, gradients and optimizer state."""
    own = own_bytes(model, mode, engine, devices, steps=steps)
    return own / float(state_bytes(model.tensors, mode, engine, devices).mean())


def row(model: ScaleModel, engine: Engine, devices: int) -> tuple[str, ...]:
    """One line of the table, as text. Track, LowLR and Anchor keep the same; the one with most is shown."""
    states = float(state_bytes(model.tensors, "track", engine, devices).mean())
    other = max(MODES[1:], key=lambda mode: own_bytes(model, mode, engine, devices))
    return (
        engine,
        str(devices),
        f"{states / 2**30:,.2f}{'*' if states > DEVICE_MEMORY else ''}",
        f"{own_bytes(model, 'freeze', engine, devices) / 2**20:,.2f}",
        f"{share_of_states(model, 'freeze', engine, devices):.3%}",
        f"{own_bytes(model, other, engine, devices) / 2**20:,.2f}",
        f"{share_of_states(model, other, engine, devices):.3%}",
        f"{capture_peak(model.tensors, engine) / 2**20:,.0f}",
        f"{start_traffic(model.tensors, engine, devices) / 2**30:,.2f}",
        f"{log_traffic(model.num_cells, LOG_STEPS, devices) / 2**10:,.2f}",
    )


def headline(model: ScaleModel) -> str:
    """Sizes, held rows, and what the first process keeps in host memory and beside the run."""
    routes = model.routes
    return (
        f"{model.name} ({routes.model_type}): {routes.num_model_parameters / 1e9:,.2f}B parameters, "
        f"{model.num_active / 1e9:,.1f}B met by a token; held {routes.num_parameters / 1e6:,.0f}M ({routes.share:.2%}) "
        f"in {len(routes.layers)} layers"
        f"{', queries beside gates' if model.splits_rows else ''}; sidecar "
        f"{sidecar_bytes(model.tensors, 'FSDP2') / 2**30:,.2f} GiB (FSDP2), "
        f"{sidecar_bytes(model.tensors, 'ZeRO-3') / 2**30:,.2f} GiB (ZeRO)"
    )


def table(rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    header = ("model", *COLUMNS) if markdown else COLUMNS
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *rows))
    widths = [max(len(line[at]) for line in (header, *rows)) for at in range(len(header))]
    return "\n".join(
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (header, *rows)
    )


def rows_of(model: ScaleModel) -> list[tuple[str, ...]]:
    return [row(model, engine, devices) for engine in engines_for(model) for devices in DEVICES]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", action="store_true", help="one table, as in docs/scale.md")
    arguments = parser.parse_args(argv)
    models = [describe(name) for name in MODELS]
    if arguments.markdown:
        print(table([(model.name, *line) for model in models for line in rows_of(model)], markdown=True))
        return
    print(
        f"computed, not measured: 16-bit computation, float32 masters, AdamW; a log line every {LOG_STEPS} steps; "
        "* over 80 GiB"
    )
    for model in models:
        print(f"\n{headline(model)}\n\n{table(rows_of(model), markdown=False)}")


if __name__ == "__main__":
    main()
