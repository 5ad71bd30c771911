"""`python -m routeguard.demo`: the demo from the command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """Read the command line and run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m routeguard.demo", description="What fine-tuning does to recall, measured."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for demo.json, recall.png and the runs"
    )
    parser.add_argument("--all", action="store_true", help="every mode of protection and repair, not only the default")
    parser.add_argument("--seeds", type=int, default=1, help="repeat everything with this many seeds")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    options = parser.parse_args()

    from routeguard.demo.console import show_demo

    show_demo(options.output, seeds=options.seeds, all_modes=options.all, steps=options.steps)


if __name__ == "__main__":
    main()
