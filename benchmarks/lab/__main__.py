"""The lab's command line.

python -m benchmarks.lab pretrain                  make the small models (once; minutes each)
python -m benchmarks.lab run                       do every run that is still missing
python -m benchmarks.lab run --quick               the quick version, from nothing
python -m benchmarks.lab reach                     how far back data and gradient reach (once; seconds)
python -m benchmarks.lab report                    tables and plots from the results
python -m benchmarks.lab conditions                list the conditions
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.lab import quick


def main() -> None:
    """Read the command line and do what it asks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    pretraining = commands.add_parser("pretrain", help="make the pretrained models that are not there yet")
    _add_architectures(pretraining)
    pretraining.add_argument("--model-seed", type=int, default=0, help="seed of weights and pretraining data")
    pretraining.add_argument("--workers", type=int, default=1, help="processes at a time")

    running = commands.add_parser("run", help="fine-tune and score whatever is missing in the results")
    _add_architectures(running)
    running.add_argument("--model-seed", type=int, default=0, help="which pretrained model")
    running.add_argument("--data", nargs="+", default=["rules"], help="kinds of fine-tuning data (default: rules)")
    running.add_argument("--conditions", nargs="+", help="names, or beginnings with * (default: conditions/sets.py)")
    running.add_argument("--seeds", nargs="+", type=int, help="default: the development seeds")
    running.add_argument("--confirm", action="store_true", help="the confirmation seeds, for the chosen conditions")
    running.add_argument("--workers", type=int, default=1, help="processes at a time, each with one thread")
    running.add_argument("--results", type=Path, help="folder of the results (default: docs/evidence/results)")
    running.add_argument("--quick", action="store_true", help=f"a small experiment from nothing, in {quick.FOLDER}")

    reaching = commands.add_parser("reach", help="measure how far back data and gradient reach")
    _add_architectures(reaching)
    reaching.add_argument("--results", type=Path, help="folder of the results (default: docs/evidence/results)")

    reporting = commands.add_parser("report", help="write tables and plots from the results")
    reporting.add_argument("--results", type=Path, help="folder of the results (default: docs/evidence/results)")
    reporting.add_argument("--output", type=Path, help="folder of README.md and plots (default: docs/evidence)")

    commands.add_parser("conditions", help="list the conditions")
    options = parser.parse_args()
    try:
        _do(options)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _do(options: argparse.Namespace) -> None:
    from benchmarks.lab import commands

    if options.command == "pretrain":
        commands.pretrain(options.architecture, model_seed=options.model_seed, workers=options.workers)
    elif options.command == "reach":
        commands.reach(options.architecture, results=options.results)
    elif options.command == "conditions":
        commands.list_conditions()
    elif options.command == "report":
        commands.report(options.results, options.output)
    elif options.quick:
        quick.run(workers=options.workers)
    else:
        commands.run(
            options.architecture,
            data=options.data,
            conditions=options.conditions,
            seeds=options.seeds,
            confirm=options.confirm,
            model_seed=options.model_seed,
            workers=options.workers,
            results=options.results,
        )


def _add_architectures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architecture", nargs="+", help="names (default: all)")


if __name__ == "__main__":
    main()
