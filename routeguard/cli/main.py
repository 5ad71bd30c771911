"""The `routeguard` command. Each subcommand is a thin shell over a function of the library.

Exit codes: 0 done, 1 a check failed, 2 the call could not be carried out (bad input), 3 a file could not be read or
written (disk full, no permission).
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click

from routeguard.cli.checkpoints import average, drift, restore, undo
from routeguard.cli.diagnose import diagnose, locality
from routeguard.cli.doctor import doctor
from routeguard.cli.recall import gate, recall
from routeguard.cli.report import report
from routeguard.cli.shared import (
    FolderOrFile,
    clear_errors,
    json_option,
    layers_option,
    libraries_on_stderr,
    norms_option,
    parse_layers,
)


class _ByUse(click.Group):
    """Lists its commands in the order in which they were added: that in which one comes to use them."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_ByUse, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="routeguard")
def app() -> None:
    """Fine-tune a hybrid LLM to reason without making it forget how to look far back.

    Begin with `demo` (the effect, on a tiny model), `inspect CHECKPOINT` (what would be protected) or `doctor CONFIG`
    (what a guard would do to your run).

    Exit codes: 0 done, 1 a check failed, 2 bad input, 3 a file could not be read or written.
    """


@click.command(short_help="Which rows decide where full attention looks.")
@click.argument("path", type=FolderOrFile)
@layers_option
@norms_option
@click.option("--shared", is_flag=True, help="Also rows that feed the values too.")
@json_option
@clear_errors
def inspect(path: Path, layers: str | None, norms: bool, shared: bool, as_json: bool) -> None:
    """Show which rows of which tensors decide where full attention looks.

    PATH is a checkpoint folder: config.json and safetensors, of which only the headers are read. Or a folder with a
    saved state transition: its settings and sizes.
    """
    import json

    from routeguard.routes.find import find_routes
    from routeguard.state_transition.describe import describe_saved, holds_state_transition, saved_transition

    if holds_state_transition(path):
        if layers or norms or shared:
            raise ValueError(
                f"{path} holds a state transition, no checkpoint: --layers, --norms and --shared do not apply"
            )
        click.echo(json.dumps(saved_transition(path), indent=2) if as_json else describe_saved(path))
        return
    routes = find_routes(path, layers=parse_layers(layers), norms=norms, shared=shared)
    click.echo(routes.to_json(indent=2) if as_json else str(routes))


@click.command(short_help="Do queries and keys still equal the start?")
@click.argument("folder", type=FolderOrFile)
@click.option("--against", type=FolderOrFile, required=True, help="The starting checkpoint, or a guard's sidecar.")
@layers_option
@norms_option
@json_option
@clear_errors
def verify(folder: Path, against: Path, layers: str | None, norms: bool, as_json: bool) -> None:
    """Check that the query and key rows of FOLDER equal those of the start, byte for byte.

    FOLDER is a checkpoint or an adapter. Exit code 1 if they differ.
    """
    import json

    from routeguard.checkpoint.verify import verify_checkpoint

    report = verify_checkpoint(folder, against, layers=parse_layers(layers), norms=norms)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise click.exceptions.Exit(1)


@click.command(short_help="See recall fall and what helps, on a tiny model.")
@click.option("--all", "everything", is_flag=True, help="Every mode, not only unguarded, guarded and restored.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, help="Runs with different seeds: mean and range.")
@click.option("--output", type=FolderOrFile, default=Path("demo-output"), help="For the table, the plot and the runs.")
@click.option("--steps", type=click.IntRange(min=1), default=600, help="Optimizer steps of each fine-tuning.")
@json_option
@clear_errors
def demo(everything: bool, seeds: int, output: Path, steps: int, as_json: bool) -> None:
    """Fine-tune the tiny hybrid that ships with the package on chain-of-thought, with and without protection."""
    from rich.console import Console

    from routeguard.demo.console import show_demo

    console = Console(stderr=as_json)  # with --json, progress and table go to standard error
    with libraries_on_stderr() if as_json else nullcontext():
        show_demo(output, seeds=seeds, all_modes=everything, steps=steps, console=console)
    if as_json:
        click.echo((output / "demo.json").read_text(encoding="utf-8"), nl=False)


for command in (
    *(demo, inspect, doctor),
    *(restore, average, drift, verify, undo),
    *(recall, gate, diagnose, locality, report),
):
    app.add_command(command)

if __name__ == "__main__":
    app()
