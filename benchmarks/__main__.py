"""Every benchmark, one after the other: `python -m benchmarks [--device cuda]`."""

from __future__ import annotations

import argparse

from benchmarks import attention_distance, checkpoint_restore, drift, guard_step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    drift.main(["--device", device])
    print()
    guard_step.main(["--device", device])
    print()
    attention_distance.main(["--device", device])
    if device == "cpu":
        print()
        checkpoint_restore.main([])


if __name__ == "__main__":
    main()
