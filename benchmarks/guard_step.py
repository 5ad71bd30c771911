"""What guarding adds to a training step, as a ratio to the unguarded step of the same model.

The model is an LFM2 of about 40 million parameters whose routing is below 2 % of them. For each mode the whole step is
timed, guarded and unguarded in turn; and because one per cent is less than the noise of a step, what the guard itself
does after a step (drift at every step, and the logit form as at a log step) is timed alone as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM

from routeguard import Anchor, Freeze, LowLR, Track, find_routes, freeze
from routeguard.drift.meter import DriftMeter
from routeguard.protect.anchor import AnchorPull, anchored
from routeguard.protect.groups import split_groups
from routeguard.protect.held import held_parameters
from routeguard.protect.modes import Protection
from routeguard.protect.rows import take_rows

TOKENS = (2, 128)


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        full_attn_idxs=[2, 5],
        block_auto_adjust_ff_dim=False,
    )
    return Lfm2ForCausalLM(config).to(device).train()


def step_of(model: nn.Module, protect: Protection | None) -> Callable[[], None]:
    """One training step (forward, backward, clipping, fused AdamW, and the guard's part) as a function."""
    routes = find_routes(model)
    frozen = freeze(model, routes) if isinstance(protect, Freeze) else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    held = held_parameters(model, routes)
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in held if h.trainable}
    if isinstance(protect, LowLR):
        split_groups(optimizer, held, tag="low_lr", scale=protect.scale)
    if isinstance(protect, Anchor):
        groups = split_groups(optimizer, anchored(held, model), tag="anchor", weight_decay=0.0)
        AnchorPull(groups, starts, protect)
    if frozen is not None:
        frozen.attach(optimizer)
    meter = DriftMeter(model, routes, held, starts) if isinstance(protect, Track) else None
    device = next(model.parameters()).device
    ids = torch.randint(0, 32_000, TOKENS, device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if meter is not None:
            meter.measure(0)
            if meter.num_pending >= 50:
                meter.read()
        model.zero_grad()

    return step


def seconds(function: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(device: str, repetitions: int) -> None:
    plain_model = build(device)
    plain = step_of(plain_model, None)
    routes = find_routes(plain_model)
    print(
        f"model: {routes.num_model_parameters / 1e6:.1f} M parameters, routing {routes.share:.2%}, "
        f"{TOKENS[0]} x {TOKENS[1]} tokens a step"
    )
    for mode in (Freeze(), LowLR(), Track(), Anchor()):
        guarded = step_of(build(device), mode)
        times: dict[str, list[float]] = {"plain": [], "guarded": []}
        for function in (plain, guarded):
            function()
        for _ in range(repetitions):
            times["plain"].append(seconds(plain, device))
            times["guarded"].append(seconds(guarded, device))
        ratio = statistics.median(g / p for g, p in zip(times["guarded"], times["plain"], strict=True))
        print(f"  {mode.name:8} guarded / unguarded step: {ratio:.3f} (median of {repetitions} pairs)")
    guard_alone(device, repetitions, statistics.median(times["plain"]))


def guard_alone(device: str, repetitions: int, step_seconds: float) -> None:
    """The guard's own work, timed alone against the unguarded step."""
    model = build(device)
    routes = find_routes(model)
    held = held_parameters(model, routes)
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in held}
    meter = DriftMeter(model, routes, held, starts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    pull = AnchorPull(split_groups(optimizer, held, tag="anchor", weight_decay=0.0), starts, Anchor())

    def drift_with_read() -> None:
        meter.measure(0)
        meter.read()

    for name, work in (
        ("drift of one step", lambda: meter.measure(0)),
        ("drift read at a log step", drift_with_read),
        ("anchor's pull", pull.pull),
    ):
        work()
        median = statistics.median(seconds(work, device) for _ in range(10 * repetitions))
        print(f"  {name:24} / unguarded step: {median / step_seconds:.4f}")


def main(device: str = "cpu", repetitions: int = 15) -> None:
    print(f"guarded training step on {device}, {torch.get_num_threads()} threads")
    compare(device, repetitions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=15)
    main(**vars(parser.parse_args()))
