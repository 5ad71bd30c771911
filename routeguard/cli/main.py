"""The `routeguard` command. Each subcommand is a thin shell over a function of the library.

Exit codes: 0 done, 1 a check failed, 2 the call could not be carried out (bad input), 3 a file could not be read or
written (disk full, no permission).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from routeguard.cli.checkpoints import checkpoints
from routeguard.cli.diagnose import diagnose, locality
from routeguard.cli.recall import gate, recall
from routeguard.cli.shared import AsJson, Layers, Norms, clear_errors, parse_layers

app = typer.Typer(
    name="routeguard",
    help="Fine-tune a hybrid LLM to reason without making it forget how to look far back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoints)
app.add_typer(diagnose)
app.command()(locality)
app.command()(recall)
app.command()(gate)

Everything = Annotated[bool, typer.Option("--all", help="Every mode, not only unguarded, guarded and restored.")]
Seeds = Annotated[int, typer.Option(min=1, help="Runs with different seeds; the table then shows mean and range.")]
Output = Annotated[Path, typer.Option(help="Folder for the table (JSON), the plot and the runs.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps of each fine-tuning.")]


@app.command()
@clear_errors
def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint folder: config.json and safetensors.")],
    layers: Layers = None,
    norms: Norms = False,
    shared: Annotated[bool, typer.Option("--shared", help="Also rows that feed the values too.")] = False,
    json: AsJson = False,
) -> None:
    """Show which rows of which tensors decide where full attention looks. Reads headers only."""
    from routeguard.routes.find import find_routes

    routes = find_routes(path, layers=parse_layers(layers), norms=norms, shared=shared)
    typer.echo(routes.to_json(indent=2) if json else str(routes))


@app.command()
@clear_errors
def verify(
    folder: Annotated[Path, typer.Argument(help="The checkpoint or adapter folder to check.")],
    against: Annotated[Path, typer.Option("--against", help="The starting checkpoint, or a guard's sidecar.")],
    layers: Layers = None,
    norms: Norms = False,
    json: AsJson = False,
) -> None:
    """Check that the query and key rows of FOLDER equal those of the start, byte for byte. Exit code 1 if not."""
    from routeguard.checkpoint.verify import verify_checkpoint

    report = verify_checkpoint(folder, against, layers=parse_layers(layers), norms=norms)
    if json:
        import json as json_module

        typer.echo(json_module.dumps(report.to_dict(), indent=2))
    else:
        typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
@clear_errors
def demo(
    everything: Everything = False,
    seeds: Seeds = 1,
    output: Output = Path("demo-output"),
    steps: Steps = 600,
) -> None:
    """Fine-tune the tiny hybrid that ships with the package on chain-of-thought, with and without protection."""
    from routeguard.demo.console import show_demo

    show_demo(output, seeds=seeds, all_modes=everything, steps=steps)


if __name__ == "__main__":
    app()
