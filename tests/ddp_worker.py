"""One of two processes under DDP (gloo): runs every case of a row and leaves the results in a folder.

    python -m torch.distributed.run --nproc_per_node 2 -m tests.ddp_worker FOLDER

Started by tests/test_engines_ddp.py, which runs the same cases in one process and compares. Every process writes its
own parameters, so that the test also sees whether the two agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from routeguard import Anchor, LowLR, QKRestore, RouteGuard, Track
from tests.loops import tiny
from tests.trainers import run

GUARDS: dict[str, Callable[[], RouteGuard | None]] = {
    "unguarded": lambda: None,
    "freeze": RouteGuard,
    "low_lr": lambda: RouteGuard(LowLR(0.1)),
    "anchor": lambda: RouteGuard(Anchor(30.0)),
    "restored": lambda: RouteGuard(Track(), QKRestore()),
}
# model, mode, and what differs from the plain settings
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"whole tensors, {mode}": ("lfm2", mode, {}) for mode in GUARDS},
    **{f"rows, {mode}": ("qwen3_5_text", mode, {}) for mode in GUARDS},
    **{f"checkpointing, {mode}": ("lfm2", mode, {"gradient_checkpointing": True}) for mode in GUARDS},
}
RESUMED = ("freeze", "low_lr", "anchor", "restored")


def train_case(name: str, folder: Path, *, batch_size: int, resume: str | None = None, **changes: Any) -> Any:
    """Run a case; the batches of one process are those of two, side by side."""
    case, mode, settings = CASES[name]
    guard = GUARDS[mode]()
    callbacks = [] if guard is None else [guard]
    # AdamW divides by the size of the gradient: with its usual epsilon, entries whose gradient is almost zero turn
    # the rounding of another order of summation into a whole step.
    options = {
        "train_sampling_strategy": "sequential",
        "adam_epsilon": 1e-3,
        "per_device_train_batch_size": batch_size,
        **settings,
        **changes,
    }
    if options.get("gradient_checkpointing"):
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    return run(tiny(case), folder, *callbacks, resume=resume, **options)


def state(trainer: Any) -> dict[str, Any]:
    return {
        "parameters": {name: value.detach().clone() for name, value in trainer.model.named_parameters()},
        "log": trainer.state.log_history,
    }


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    for name in CASES:
        trainer = train_case(name, folder / name, batch_size=2)
        torch.save(state(trainer), folder / f"{name}.{rank}.pt")
    saving = {"save_strategy": "steps", "save_steps": 2}
    for mode in RESUMED:
        name = f"whole tensors, {mode}"
        output = folder / f"resumed {mode}"
        trainer = train_case(name, output, batch_size=2, **saving)
        torch.save(state(trainer), folder / f"straight {mode}.{rank}.pt")
        trainer = train_case(name, output, batch_size=2, resume=str(output / "checkpoint-2"), **saving)
        torch.save(state(trainer), folder / f"resumed {mode}.{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
