"""Hand-written loops over models that torch itself splits: `fully_shard`, and tensor parallelism by a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from routeguard import anchor, find_routes, freeze, low_lr, track
from routeguard.sharding.whole import whole_tensor
from tests.engines import decoder_layers
from tests.loops import tiny, train

# how it is split, the model, roles held, mode; falcon's held rows cross the border between the two processes, phi3's
# queries all lie in the first one and its keys in the second
LOOPS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    **{f"fully_shard, {m}": ("fully_shard", "lfm2", ("query", "key"), m) for m in ("freeze", "low_lr", "anchor")},
    "fully_shard, across the border": ("fully_shard", "falcon", ("query", "key"), "freeze"),
    "fully_shard, first process only": ("fully_shard", "phi3", ("query",), "freeze"),
    "fully_shard, second process only": ("fully_shard", "phi3", ("key",), "freeze"),
    "fully_shard, track": ("fully_shard", "phi3", ("query", "key"), "track"),
    **{f"tensor parallel, {m}": ("tensor parallel", "llama", ("query", "key"), m) for m in ("freeze", "track")},
}


def loop(split: str, case: str, roles: tuple[str, ...], mode: str, *, really: bool = True) -> dict[str, Any]:
    """Train for three steps, every process on the same tokens; whole parameters and the drift of each step.

    `really=False` splits nothing: the same loop in one process.
    """
    model = tiny(case)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if not really:
        pass
    elif split == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        for layer in decoder_layers(model):
            fully_shard(layer)
        fully_shard(model)
    else:
        _parallelise(model)
    routes = find_routes(model, roles=roles)  # type: ignore[arg-type]
    frozen = freeze(model, routes) if mode == "freeze" else None
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, eps=1e-3, foreach=False
    )
    if frozen is not None:
        frozen.attach(optimizer)
    elif mode == "low_lr":
        low_lr(optimizer, model, routes, scale=0.1).arm()
    elif mode == "anchor":
        anchor(optimizer, model, routes, strength=30.0)
    meter = None if mode == "freeze" else track(model, routes)
    clip = 1.0 if split == "fully_shard" else None  # torch cannot clip DTensors and plain tensors together
    train(model, optimizer, max_norm=clip, after_step=None if meter is None else meter.measure)
    return {
        "parameters": {name: whole_tensor(value).clone() for name, value in model.named_parameters()},
        "drift": [] if meter is None else [dict(sample.factors) for sample in meter.read(routing=False)],
        "num_held_here": 0 if frozen is None else sum(h.num_elements for h in (*frozen.whole, *frozen.rows)),
    }


def _parallelise(model: nn.Module) -> None:
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    for layer in decoder_layers(model):
        if hasattr(layer, "self_attn"):
            parallelize_module(layer.self_attn, mesh, {**plan, "o_proj": RowwiseParallel()})
