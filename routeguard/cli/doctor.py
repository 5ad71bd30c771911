"""`routeguard doctor`: what the guard would do to a run, found out before it starts."""

from __future__ import annotations

from pathlib import Path

import click

from routeguard.cli.shared import FolderOrFile, FolderOrName, clear_errors, completing, json_option, libraries_on_stderr


@click.command(short_help="What would the guard do to my run?")
@click.argument("config", required=False, type=FolderOrFile)
@click.option(
    "--model", type=FolderOrName, help="Folder, or a Hub id in the local cache. Default: the one that CONFIG names."
)
@click.option(
    "--protect",
    shell_complete=completing("freeze", "low_lr", "anchor", "l2_sp", "track"),
    help="freeze (the default), low_lr, anchor, l2_sp or track.",
)
@click.option(
    "--restore",
    shell_complete=completing("qk", "qk_pro", "interpolate", "average"),
    help="At the end: qk, qk_pro, interpolate or average. Default: nothing.",
)
@click.option(
    "--recipe",
    shell_complete=completing("balanced", "max_recall", "max_reasoning"),
    help="Instead of these two: balanced, max_recall or max_reasoning.",
)
@json_option
@clear_errors
def doctor(
    config: Path | None, model: str | None, protect: str | None, restore: str | None, recipe: str | None, as_json: bool
) -> None:
    """Check an environment and a training config, and say what the guard would do. Trains nothing, loads no weights.

    CONFIG is a YAML or JSON file as `trl sft --config` takes it, or a YAML of axolotl or LLaMA-Factory. Without it, the
    environment and --model are looked at. Exit code 1 if something keeps the run from being guarded.
    """
    from routeguard.diagnostics.json_text import json_text
    from routeguard.doctor.examine import examine

    with libraries_on_stderr():
        report = examine(config, model=model, protect=protect, restore=restore, recipe=recipe)
    click.echo(json_text(report.to_dict()) if as_json else str(report))
    if not report.ok:
        raise click.exceptions.Exit(1)
