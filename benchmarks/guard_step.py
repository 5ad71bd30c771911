"""What guarding adds to a training step, as a ratio to the unguarded step of the same model.

The model is a Gemma-2 of about 60 million parameters (six layers with a window, two without) whose routing is about
1 % of them. For each mode the whole step is timed, guarded and unguarded in turn; and because one per cent is less than
the noise of a step, what the guard itself does after a step (drift, and at a log step the logit form too) is timed
alone as well. On CUDA it is also shown that nothing waits for the device between log steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from benchmarks._timing import host_synchronisation_forbidden, interleaved
from routeguard import L2SP, Anchor, Freeze, LowLR, Track, find_routes, freeze, l2_sp
from routeguard.drift.meter import DriftMeter
from routeguard.protect.anchor import AnchorPull, anchored
from routeguard.protect.freeze import Frozen
from routeguard.protect.groups import split_groups
from routeguard.protect.held import held_parameters
from routeguard.protect.modes import Protection
from routeguard.protect.rows import take_rows
from routeguard.training.stillness import Stillness

TOKENS = (2, 128)
RATE, NUM_STEPS = 1e-5, 1000  # of the planned run, for the pull that is a total over it
FLOOR = "unguarded step"


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=64,
        layer_types=[*3 * ["sliding_attention"], "full_attention"] * 2,
    )
    return Gemma2ForCausalLM(config).to(device).train()


def step_of(model: nn.Module, protect: Protection | None) -> Callable[[], None]:
    """One training step (forward, backward, clipping, fused AdamW, and the guard's part) as a function."""
    routes = find_routes(model)
    frozen = freeze(model, routes) if isinstance(protect, Freeze) else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, fused=True)
    held = held_parameters(model, routes)
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in held if h.trainable}
    if isinstance(protect, LowLR):
        split_groups(optimizer, held, tag="low_lr", scale=protect.scale)
    if isinstance(protect, Anchor):
        groups = split_groups(optimizer, anchored(held), tag="anchor", weight_decay=0.0)
        AnchorPull(groups, starts, protect)
    if isinstance(protect, L2SP):
        l2_sp(optimizer, model, rates=NUM_STEPS * RATE, total=protect.total)
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


def whole_steps(device: str, rounds: int) -> float:
    """Print the ratio of each guarded step to the unguarded one; returns the seconds of the latter."""
    steps = {FLOOR: step_of(build(device), None)}
    steps |= {mode.name: step_of(build(device), mode) for mode in (Freeze(), LowLR(), Track(), Anchor(), L2SP())}
    timings = interleaved(steps, rounds=rounds, warmup=1, device=device)
    for name in steps:
        low, high = timings.spread(name, FLOOR)
        print(f"  {name:<24} {timings.ratio(name, FLOOR):.3f}  (middle half {low:.3f} to {high:.3f})")
    return timings.median(FLOOR)


def guard_alone(device: str, rounds: int, step_seconds: float) -> None:
    """Print the guard's own work after a step, timed alone, against the unguarded step."""
    model = build(device)
    held = held_parameters(model, find_routes(model))
    starts = {h.name: take_rows(h.parameter.detach(), h.rows, h.dim).clone() for h in held}
    meter = DriftMeter(model, find_routes(model), held, starts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    pull = AnchorPull(split_groups(optimizer, held, tag="anchor", weight_decay=0.0), starts, Anchor())

    def measure_and_read() -> None:
        meter.measure(0)
        meter.read()

    if device == "cuda":
        meter.measure(0)
        with host_synchronisation_forbidden():
            meter.measure(0)
            pull.groups.check()
            pull.pull()
        print("  no drift, check or pull waited for the device (sync debug mode 'error')")
    whole = l2_sp(torch.optim.AdamW(model.parameters(), lr=RATE), model, rates=NUM_STEPS * RATE)
    still = Stillness(Frozen([], [], held))
    for h in held:
        h.parameter.requires_grad_(False)
    work = {
        "drift at a step": lambda: meter.measure(0),
        "drift at a log step": measure_and_read,
        "the anchor's pull": pull.pull,
        "L2-SP's pull": whole.pull,
        "freeze's check at a log step": still.check,
    }
    timings = interleaved(work, rounds=10 * rounds, device=device)
    for name in work:
        print(f"  {name:<28} {timings.median(name) / step_seconds:.5f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard_step", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.guard_step --device cuda: skipped, there is no CUDA device here")
        return
    routes = find_routes(build("meta"))
    print(
        f"guarded training step, {arguments.device}, {torch.get_num_threads()} threads: "
        f"{routes.num_model_parameters / 1e6:.0f}M parameters, routing {routes.share:.2%}, "
        f"{TOKENS[0]} x {TOKENS[1]} tokens"
    )
    print(f"whole steps, as ratios to the {FLOOR}")
    step_seconds = whole_steps(arguments.device, arguments.rounds)
    print("what the guard does after a step, alone, as ratios to the same")
    guard_alone(arguments.device, arguments.rounds, step_seconds)


if __name__ == "__main__":
    main()
