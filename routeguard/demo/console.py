"""Run the demo on a terminal: progress while it runs, then the table and the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from routeguard.quiet_libraries import quiet_libraries

if TYPE_CHECKING:
    from routeguard.demo.run import DemoResult

LOG_WIDTH = 120  # fits the table of every mode over several seeds


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
    if not console.is_terminal:
        console.width = max(console.width, LOG_WIDTH)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_libraries(), _progress_on(console) as progress:
        from routeguard.demo import report, run

        result = run.run_demo(folder, seeds=seeds, all_modes=all_modes, steps=steps, progress=progress)
    report.write_json(result, folder / "demo.json")
    drawn = report.write_plot(result, folder / "recall.png")
    console.print(report.table(result))
    console.print(report.LEGEND, highlight=False, markup=False)
    console.print(
        f"{result.seconds:.0f} s. Written: {folder / 'demo.json'}" + (f", {folder / 'recall.png'}" if drawn else "")
    )
    if not drawn:
        console.print(report.PLOT_HINT, markup=False)
    return result


@contextmanager
def _progress_on(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Progress for `run_demo`: bars on a terminal; in a log, one line when a stage begins and every 100 steps."""
    if not console.is_terminal:
        seen: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage not in seen or done % 100 == 0:
                console.print(f"{stage}{f' {done}/{total}' if total else ''}", highlight=False)
            seen.add(stage)

        yield line
        return

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(SpinnerColumn(), *columns, console=console) as bars:
        current: tuple[str, TaskID] | None = None

        def bar(stage: str, done: int, total: int) -> None:
            nonlocal current
            if current is None or current[0] != stage:
                if current is not None and bars.tasks[bars.task_ids.index(current[1])].total is None:
                    bars.remove_task(current[1])
                current = (stage, bars.add_task(stage, total=total or None))
            bars.update(current[1], completed=done)

        yield bar
