"""Restoring a checkpoint on disk beside copying it: `python -m benchmarks.checkpoint_restore [--gigabytes 0.5 8]`.

A hybrid checkpoint of the asked size (lfm2's names, bfloat16, routing 1 to 2 %) is written, a BASE with other routing
rows beside it, and then, each in a process of its own and with a warm cache: `cp -r`; `cp -r` and fsync of every file,
which is the floor; our restore into a copy and in place; and, if `--mergekit PATH/TO/mergekit-yaml` is given, the same
with mergekit. `checkpoint_drift` is run with the files dropped from the cache, beside a shard read from end to end and
the same rows only read. Peaks include the 9 MiB of a launcher. Between sizes, let the disk come to rest.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import routeguard
from benchmarks._large_checkpoint import BLOCK, make_base, make_checkpoint
from routeguard import find_routes
from routeguard.storage.folder import stored_checkpoint


@dataclass(frozen=True)
class Run:
    """Wall seconds and peak resident bytes of one process."""

    seconds: float
    peak_bytes: int


# Runs a command from a process that is itself small: a child's peak never shows as less than its parent's.
_LAUNCHER = (
    "import os, sys; pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ); _, status, usage = os.wait4(pid, 0); "
    "print(usage.ru_maxrss, file=sys.stderr); sys.exit(status != 0)"
)


def run(command: Sequence[str | Path]) -> Run:
    """Run a command to its end. Raises RuntimeError when it fails."""
    program = shutil.which(str(command[0])) or str(command[0])
    launch = [sys.executable, "-ISc", _LAUNCHER, program, *map(str, command[1:])]
    started = time.perf_counter()
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return Run(seconds, int(done.stderr.split()[-1]) * (1 if sys.platform == "darwin" else 1024))


def sync_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def warm(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as stream:
            while stream.read(BLOCK):
                pass


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def mergekit_recipe(base: Path, tuned: Path) -> str:
    """QK-Restore as a mergekit config: a linear merge with weight 1 or 0 for each kind of tensor."""

    def weights(routing: int) -> str:
        rest = f"        - value: {1 - routing}"
        chosen = "".join(f"        - filter: self_attn.{n}_proj\n          value: {routing}\n" for n in "qk")
        return f"      weight:\n{chosen}{rest}\n"

    return (
        "merge_method: linear\nparameters:\n  normalize: false\nmodels:\n"
        f"  - model: {base}\n    parameters:\n{weights(1)}  - model: {tuned}\n    parameters:\n{weights(0)}"
    )


def compare(gigabytes: float, rounds: int, mergekit: Path | None, place: Path) -> None:
    """Print every figure for one size."""
    base, tuned, out = place / "base", place / "tuned", place / "out"
    total, routing = make_checkpoint(tuned, gigabytes, seed=0)
    make_base(tuned, base, seed=1)
    headers = 2 * sum(_header_bytes(file) for file in tuned.iterdir())
    print(f"\n{total / 1e9:.2f} GB in {len(list(tuned.glob('*.safetensors')))} shards, routing {routing / 1e6:.1f} MB")
    cli = [sys.executable, "-m", "routeguard.cli.main"]

    def copied_and_synced() -> Run:
        copied = run(["cp", "-r", tuned, out])
        return Run(copied.seconds + timed(lambda: sync_files(out)), copied.peak_bytes)

    actions: dict[str, Callable[[], Run]] = {
        "cp": lambda: run(["cp", "-r", tuned, out]),
        "cp, fsync": copied_and_synced,
        "restore --out": lambda: run([*cli, "restore", base, tuned, "--out", out, "--quiet"]),
        "restore_checkpoint()": lambda: _call(base, tuned, out),
        "restore --in-place": lambda: run([*cli, "restore", base, tuned, "--in-place", "--quiet"]),
    }
    found: dict[str, list[Run]] = {name: [] for name in (*actions, "undo")}
    names = list(actions)
    for at in range(rounds):
        for name in names[at % len(names) :] + names[: at % len(names)]:  # each round starts with another one
            warm(tuned)
            os.sync()
            found[name].append(actions[name]())
            if out.exists():
                shutil.rmtree(out)
            else:
                found["undo"].append(run([*cli, "undo", tuned, "--quiet"]))
    seconds = {name: median(r.seconds for r in runs) for name, runs in found.items()}
    floor = seconds["cp, fsync"]
    for name, runs in found.items():
        peak = max(r.peak_bytes for r in runs) / 2**20
        memory = f"  peak {peak:5.0f} MiB" if peak else "  (the call alone, without starting Python)"
        print(f"  {name:<20} {seconds[name]:7.2f} s  {seconds[name] / floor:5.2f} of (cp, fsync){memory}")
    limit, factor = (1.1, "1.1") if gigabytes > 2 else (1.15, "1.15")
    print(f"  target for --out: {factor} x floor + 0.3 s = {limit * floor + 0.3:.2f} s")
    print(f"  target for memory: 64 MiB + 10 x headers and index = {64 + 10 * headers / 2**20:.0f} MiB")
    rate = _write_rate(place)
    target = 0.3 + 2 * routing / rate
    print(f"  target for --in-place: 0.3 s + 2 x routing bytes / {rate / 1e9:.2f} GB/s = {target:.2f} s")
    _drift_beside_reading(base, tuned, routing, rounds)
    if mergekit is not None:
        recipe = place / "recipe.yaml"
        recipe.write_text(mergekit_recipe(base, tuned))
        theirs = run([mergekit, recipe, place / "merged"])
        shutil.rmtree(place / "merged")
        ratios = [theirs.seconds / seconds[name] for name in ("restore --out", "restore_checkpoint()")]
        peak = theirs.peak_bytes / 2**20
        beside = f"{ratios[0]:.0f} x the command, {ratios[1]:.0f} x the call"
        print(f"  mergekit {theirs.seconds:.2f} s, peak {peak:.0f} MiB: {beside}")


def _call(base: Path, tuned: Path, out: Path) -> Run:
    """The function in a process that has imported what it needs, by that process' clock."""
    code = (
        "import sys, time; from routeguard.checkpoint.restore import restore_checkpoint as restore\n"
        "started = time.perf_counter(); restore(sys.argv[1], sys.argv[2], out=sys.argv[3])\n"
        "print(time.perf_counter() - started)"
    )
    command = [sys.executable, "-c", code, str(base), str(tuned), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Run(float(done.stdout), 0)


def _drift_beside_reading(base: Path, tuned: Path, routing: int, rounds: int) -> None:
    from routeguard import checkpoint_drift

    checkpoint_drift(base, tuned)  # imports
    names = [route.parameter for route in find_routes(tuned)]
    spans = [stored_checkpoint(folder)[name] for name in names for folder in (base, tuned)]
    largest = max(tuned.glob("*.safetensors"), key=lambda file: file.stat().st_size)

    def read_rows() -> None:
        with ThreadPoolExecutor(4) as readers:
            list(readers.map(lambda tensor: _read(tensor.file, tensor.offset, tensor.num_bytes), spans))

    actions: dict[str, tuple[int, Callable[[], object]]] = {
        "drift": (2 * routing, lambda: checkpoint_drift(base, tuned)),
        "rows": (2 * routing, read_rows),
        "sequential": (largest.stat().st_size, lambda: _read(largest, 0, largest.stat().st_size)),
    }
    rates: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, (amount, action) in actions.items():
            for folder in (base, tuned):
                drop_from_cache(folder)
            rates[name].append(amount / timed(action) / 1e9)
    drift, rows, sequential = (median(rates[name]) for name in actions)
    print(
        f"  checkpoint_drift, cold: {drift:.2f} GB/s of routing bytes; a shard read from end to end {sequential:.2f} "
        f"GB/s: {drift / sequential:.2f} (target 0.5); the same rows only read {rows:.2f} GB/s: {drift / rows:.2f}"
    )


def _read(file: Path, start: int, count: int) -> None:
    buffer = memoryview(bytearray(4 * 2**20))
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        while count > 0 and (got := stream.readinto(buffer[: min(count, len(buffer))])):
            count -= got


def _write_rate(place: Path) -> float:
    file = place / "written"
    block = os.urandom(BLOCK)

    def write() -> None:
        with file.open("wb", buffering=0) as stream:
            for _ in range(16):
                stream.write(block)
            os.fsync(stream.fileno())

    rate = 16 * BLOCK / median(timed(write) for _ in range(3))
    file.unlink()
    return rate


def _header_bytes(file: Path) -> int:
    if file.suffix == ".safetensors":
        return 8 + int.from_bytes(file.open("rb").read(8), "little")
    return file.stat().st_size if file.name.endswith(".index.json") else 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mergekit", type=Path, help="path of the mergekit-yaml command, to compare with")
    parser.add_argument("--folder", type=Path, help="where to write (three times the size); default: temporary")
    options = parser.parse_args(arguments)
    compileall.compile_dir(Path(routeguard.__file__).parent, quiet=1)  # as pip does when it installs a package
    print("restoring a checkpoint on disk; every figure is the median of processes of their own, cache warm")
    for gigabytes in options.gigabytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            compare(gigabytes, options.rounds, options.mergekit, Path(place))


if __name__ == "__main__":
    main()
