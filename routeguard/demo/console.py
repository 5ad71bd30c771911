"""Run the demo on a terminal: progress while it runs, then the table and the files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from routeguard.demo import report
from routeguard.demo.run import DemoResult, run_demo


def show_demo(
    output_dir: str | Path = "demo-output",
    *,
    seeds: int = 1,
    all_modes: bool = False,
    steps: int = 600,
    console: Console | None = None,
) -> DemoResult:
    """Run the demo with progress shown, print its table, and write `demo.json` and `recall.png` to `output_dir`.

    Arguments are those of `run_demo`; `console` is where to print (default: standard output).
    """
    console = console or Console()
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with _no_kernel_hints(), Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done)

        result = run_demo(folder, seeds=seeds, all_modes=all_modes, steps=steps, progress=progress)
    report.write_json(result, folder / "demo.json")
    drawn = report.write_plot(result, folder / "recall.png")
    console.print(report.table(result))
    console.print(
        f"{result.seconds:.0f} s. Written: {folder / 'demo.json'}" + (f", {folder / 'recall.png'}" if drawn else "")
    )
    if not drawn:
        console.print(report.PLOT_HINT, markup=False)
    return result


@contextmanager
def _no_kernel_hints() -> Iterator[None]:
    """Keep transformers' hints about faster CUDA kernels out of the demo; the model is tiny and on the CPU."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
