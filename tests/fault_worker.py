"""One of two processes that is killed in the middle of a step, or in the restore at the end, or that resumes.

python -m torch.distributed.run --nproc_per_node 2 -m tests.fault_worker ENGINE FOLDER straight|step|restore|resume
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from routeguard import QKRestore, RouteGuard, Track
from routeguard.protect.optimizers import inner_optimizer
from routeguard.training import ending
from tests.engine_worker import let_accelerate_run_deepspeed_on_cpus, let_accelerate_shard_on_cpus
from tests.engines import SAVING, settings, state
from tests.leaving import leave_together
from tests.loops import tiny
from tests.trainers import run

KILLED = 9


class KilledInStep(TrainerCallback):
    """The second process dies in step 3, after the gradients and before the optimizer."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and os.environ["RANK"] == "1":
            os._exit(KILLED)


class KilledBetweenGroups(TrainerCallback):
    """DeepSpeed steps one group of masters after the other: the second process dies in step 3, between two of them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        def after_a_group(*_: Any) -> None:
            if state.global_step == 2 and os.environ["RANK"] == "1":
                os._exit(KILLED)

        inner_optimizer(optimizer).register_step_post_hook(after_a_group)


def killed_in_restore(model: Any, *arguments: Any, **options: Any) -> Any:
    """Half of the queries and keys have been written when the process dies."""
    with torch.no_grad():
        routed = [p for name, p in model.named_parameters() if name.endswith(("q_proj.weight", "k_proj.weight"))]
        for parameter in routed[: len(routed) // 2]:
            parameter.zero_()
    os._exit(KILLED)


def killed_in_restore_of_shards(shards: Any, *arguments: Any, **options: Any) -> Any:
    with torch.no_grad():
        for shard in shards[: len(shards) // 2]:
            shard.parameter.zero_()
    os._exit(KILLED)


def main(engine: str, folder: Path, what: str) -> None:
    zero = engine.startswith("zero")
    if engine == "fsdp2":
        let_accelerate_shard_on_cpus()
    elif zero:
        let_accelerate_run_deepspeed_on_cpus()
    if what == "restore":
        ending.restore = killed_in_restore  # type: ignore[assignment]
        ending.restore_shards = killed_in_restore_of_shards  # type: ignore[assignment]
    callbacks = [KilledBetweenGroups() if zero else KilledInStep()] if what == "step" else []
    resume = None
    if what == "resume":
        resume = str(max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))
    options = {"train_sampling_strategy": "sequential", **SAVING, **settings(engine, "whole tensors, restored")}
    trainer = run(tiny("lfm2"), folder, RouteGuard(Track(), QKRestore()), *callbacks, resume=resume, **options)
    torch.save(state(trainer)["parameters"], folder / f"end.{os.environ['RANK']}.pt")
    leave_together()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
