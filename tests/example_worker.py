"""Run examples/engines/sft.py as one of two gloo processes that stand for accelerators.

    python -m torch.distributed.run --nproc_per_node 2 -m tests.example_worker ENGINE ARGUMENTS…

Started by tests/test_example_engines.py. The example itself is not changed; only accelerate is told that CPUs will do.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.engine_worker import let_accelerate_run_deepspeed_on_cpus, let_accelerate_shard_on_cpus
from tests.leaving import leave_together

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "engines" / "sft.py"


def main(engine: str, arguments: list[str]) -> None:
    if engine == "fsdp2":
        let_accelerate_shard_on_cpus()
    else:
        let_accelerate_run_deepspeed_on_cpus()
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    leave_together()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
