"""One of two processes of a plain loop over FSDP1: `python -m tests.fsdp1_worker FOLDER`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from routeguard import find_routes, freeze
from tests.leaving import leave_together
from tests.loops import batch, tiny


def main(folder: Path, *, guarded: bool) -> None:
    model = tiny("lfm2")
    if guarded:
        freeze(model, find_routes(model))
    by_layer = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=True, auto_wrap_policy=by_layer, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        ids = batch(10 * step + dist.get_rank())
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        named = wrapped.named_parameters()
        whole = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in named}
    torch.save(whole, folder / f"{'guarded' if guarded else 'plain'}.{dist.get_rank()}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for choice in (True, False):
        main(Path(sys.argv[1]), guarded=choice)
    leave_together()
