"""Cost of measuring drift, as a ratio to one fused AdamW step over the same query and key weights.

    python -m benchmarks.drift                  # CPU, 1 thread and all threads, float32 and bfloat16
    python -m benchmarks.drift --device cuda    # events, and proof that nothing waits for the device

Lines: the Frobenius drift of every tensor, and the routing form of every head with a rotary embedding on all, half and
none of a head's dimensions; by plain torch operations, and by the compiled kernels where torch can compile.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks._timing import Timings, host_synchronisation_forbidden, interleaved
from routeguard.drift.frobenius import Kernel, compiled_kernel, squared_distance
from routeguard.drift.routing_form import PairKernel, compiled_pair_kernel, prepare, routing_drift
from routeguard.routes.collection import AttentionLayer

FLOOR = "fused AdamW step (floor)"
FROBENIUS, COMPILED = "Frobenius drift", ", compiled"
ROTARY, PARTIAL, WITHOUT = "routing form, rotary", "routing form, half rotary", "routing form, no rotary"
TARGETS = {FROBENIUS: 0.8, FROBENIUS + COMPILED: 0.8, ROTARY: 2.0, ROTARY + COMPILED: 2.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Subject:
    """Query and key weights of some layers after a small change, their starts, and an optimizer over them."""

    def __init__(self, layers: int, width: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, scale: float) -> Tensor:
            return (scale * torch.randn(rows, width, generator=generator)).to(device, dtype)

        self.heads, self.key_heads, self.head_dim = width // head_dim, max(1, width // head_dim // 4), head_dim
        shapes = [self.heads * head_dim, self.key_heads * head_dim] * layers
        self.parameters = [torch.nn.Parameter(random(rows, 0.02)) for rows in shapes]
        self.starts = [parameter.detach().clone() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = random(parameter.shape[0], 1e-3)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)

    def step(self) -> None:
        self.optimizer.step()

    def frobenius(self, kernel: Kernel | None) -> Callable[[], list[Tensor]]:
        pairs = list(zip(self.parameters, self.starts, strict=True))
        return lambda: [squared_distance(now, start, kernel=kernel) for now, start in pairs]

    def routing(self, rotary_dim: int, kernel: PairKernel | None) -> Callable[[], list[Tensor]]:
        geometry = AttentionLayer(0, "attention", self.heads, self.key_heads, self.head_dim, rotary_dim)
        queries, keys = self.parameters[::2], self.parameters[1::2]
        starts = zip(self.starts[::2], self.starts[1::2], strict=True)
        layers = list(zip(queries, keys, [prepare(query, key, geometry) for query, key in starts], strict=True))
        return lambda: [routing_drift(query, key, reference, kernel=kernel) for query, key, reference in layers]


def measures(
    subject: Subject, kernel: Kernel | None, pair_kernel: PairKernel | None
) -> dict[str, Callable[[], list[Tensor]]]:
    """What is timed, by name; compiled versions where there are kernels."""
    found = {FROBENIUS: subject.frobenius(None)}
    if kernel is not None:
        found[FROBENIUS + COMPILED] = subject.frobenius(kernel)
    for name, rotary_dim in {ROTARY: subject.head_dim, PARTIAL: subject.head_dim // 2, WITHOUT: 0}.items():
        found[name] = subject.routing(rotary_dim, None)
        if pair_kernel is not None and rotary_dim:
            found[name + COMPILED] = subject.routing(rotary_dim, pair_kernel)
    return found


def table(timings: Timings, names: Sequence[str]) -> str:
    lines = [f"  {FLOOR:<36} 1.00"]
    for name in names:
        ratio, (low, high), target = timings.ratio(name, FLOOR), timings.spread(name, FLOOR), TARGETS.get(name)
        verdict = "" if target is None else f"  target {target:.1f}: {'met' if ratio <= target else 'MISSED'}"
        lines.append(f"  {name:<36} {ratio:4.2f}  (middle half {low:.2f} to {high:.2f}){verdict}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> None:
    threads: Sequence[int | None] = arguments.threads if arguments.device == "cpu" else [None]
    for name in arguments.dtypes:
        subject = Subject(arguments.layers, arguments.width, arguments.head_dim, DTYPES[name], arguments.device)
        for count in threads:
            if count is not None:
                torch.set_num_threads(count)
                torch.compiler.reset()  # a compiled kernel keeps the number of threads it was made for
                compiled_kernel.cache_clear()
                compiled_pair_kernel.cache_clear()
            kernel = None if arguments.no_compile else compiled_kernel(arguments.device)
            pair_kernel = None if arguments.no_compile else compiled_pair_kernel(arguments.device)
            functions = measures(subject, kernel, pair_kernel)
            if arguments.device == "cuda":
                for function in functions.values():
                    function()  # compile and load outside of the check
                with host_synchronisation_forbidden():
                    for function in functions.values():
                        function()
            timings = interleaved(
                {FLOOR: subject.step, **functions},
                rounds=arguments.rounds,
                device=arguments.device,
                clock=arguments.clock,
            )
            where = f"{count} thread{'s' if count != 1 else ''}" if count else torch.cuda.get_device_name()
            size = sum(parameter.numel() for parameter in subject.parameters) / 1e6
            print(f"{name}, {where}: {arguments.layers} layers of width {arguments.width}, {size:.0f}M scalars")
            print(table(timings, list(functions)))
            if arguments.device == "cuda":
                print("  no measure waited for the device (sync debug mode 'error')")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048, help="d_model; keys have a quarter of the query heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: for one thread on a busy machine"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled kernel out")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.drift --device cuda: skipped, there is no CUDA device here")
        return
    print("drift: ratios to one fused AdamW step over the same tensors (median of the rounds' ratios)")
    run(arguments)


if __name__ == "__main__":
    main()
