"""One of two gloo processes: runs every case of an engine and leaves the results in a folder.

    python -m torch.distributed.run --nproc_per_node 2 -m tests.engine_worker ENGINE FOLDER

Started by tests/test_engines_*.py. Every process writes its own results, so that a test also sees whether they agree.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engine_extras import EXTRAS
from tests.engines import CASES, RESUMED, SAVING, settings, state, train_case
from tests.leaving import leave_together
from tests.sharded_loops import LOOPS, loop


def let_accelerate_shard_on_cpus() -> None:
    """accelerate takes its FSDP path on accelerators only; say that these gloo processes are some."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    original = PartialState.__init__

    def patched(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = patched  # type: ignore[method-assign]


def let_accelerate_run_deepspeed_on_cpus() -> None:
    """accelerate sees no processes without an accelerator; say that these gloo processes are some, on the CPU."""
    import transformers.training_args
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def prepare_backend(self: Any, *arguments: Any, **options: Any) -> tuple[str, Any]:
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend = prepare_backend  # type: ignore[method-assign]
    PartialState.set_device = set_device  # type: ignore[method-assign]
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # it asks for a GPU without use_cpu


def consolidated(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own consolidation makes of a checkpoint that is written now."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    trainer.model_wrapped.save_checkpoint(str(folder))
    torch.distributed.barrier()
    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))


def main(engine: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    if engine == "fsdp2":
        let_accelerate_shard_on_cpus()
        torch.distributed.init_process_group("gloo")
        for name, how in LOOPS.items():
            torch.save(loop(*how), folder / f"{name}.{rank}.pt")
    elif engine.startswith("zero"):
        let_accelerate_run_deepspeed_on_cpus()
    for name, case in CASES[engine].items():
        trainer = train_case(case, folder / name, batch_size=2, **settings(engine, name))
        torch.save(state(trainer), folder / f"{name}.{rank}.pt")
        if engine.startswith("zero") and "restored" in name:
            torch.save(consolidated(trainer, folder / f"saved {name}"), folder / f"zero_to_fp32 {name}.{rank}.pt")
    for mode in RESUMED:
        name = f"whole tensors, {mode}"
        case = CASES[engine][name]
        options = {"batch_size": 2, **SAVING, **settings(engine, name)}
        output = folder / f"resumed {mode}"
        torch.save(state(train_case(case, output, **options)), folder / f"straight {mode}.{rank}.pt")
        trainer = train_case(case, output, resume=str(output / "checkpoint-2"), **options)
        torch.save(state(trainer), folder / f"resumed {mode}.{rank}.pt")
    for name, extra in EXTRAS[engine].items():
        torch.save(extra.run(engine, folder / name), folder / f"{name}.{rank}.pt")
    leave_together()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
