"""`routeguard restore`, `average`, `drift` and `undo`: repair and compare checkpoints on disk."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from routeguard.cli.shared import (
    FolderOrFile,
    FolderOrName,
    clear_errors,
    completing,
    insist_option,
    json_option,
    layers_option,
    norms_option,
    parse_heads,
    parse_layers,
    parse_roles,
)

roles_option = click.option("--roles", default="query,key", help="For ablations also value and output.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")


@click.command(short_help="Put queries and keys back to those of the start.")
@click.argument("base", type=FolderOrName)
@click.argument("tuned", type=FolderOrFile)
@click.option("--out", type=FolderOrFile, help="Folder for the repaired copy; must not exist.")
@click.option("--in-place", is_flag=True, help="Change TUNED itself, with an undo file.")
@click.option(
    "--method",
    default="qk",
    shell_complete=completing("qk", "qk_pro", "interpolate"),
    help="qk (QK-Restore), qk_pro or interpolate.",
)
@click.option("--ridge", type=float, help="Of qk_pro, 0 to inf. Default 0.1.")
@click.option("--alpha", type=float, help="Of interpolate, 0 to 1. Default 0.5.")
@roles_option
@layers_option
@click.option("--heads", metavar="3:0,2;7:1", help="Only these query heads (layer:heads) and the keys they read.")
@norms_option
@insist_option
@quiet_option
@json_option
@clear_errors
def restore(
    base: str,
    tuned: Path,
    out: Path | None,
    in_place: bool,
    method: str,
    ridge: float | None,
    alpha: float | None,
    roles: str,
    layers: str | None,
    heads: str | None,
    norms: bool,
    insist: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Put the queries and keys of TUNED's full-attention layers back to those of BASE. All other bytes stay.

    BASE is what the tuning started from: a folder, a Hub model id, or a guard's sidecar. TUNED is a checkpoint folder
    or an adapter folder.
    """
    from routeguard.checkpoint.restore import restore_checkpoint

    with _ProgressBar(shown=not quiet and not as_json) as progress:
        report = restore_checkpoint(
            base,
            tuned,
            out=out,
            in_place=in_place,
            method=_method(method, ridge, alpha),
            roles=parse_roles(roles),
            layers=parse_layers(layers),
            heads=parse_heads(heads),
            norms=norms,
            insist=insist,
            progress=progress,
        )
    try:
        _show(report, quiet=quiet, as_json=as_json)
    except OSError as error:  # a full disk or a closed pipe behind standard output
        done = "was changed in place (`routeguard undo` brings it back)" if in_place else "was written"
        click.echo(f"routeguard: {report.output} {done}; only its report could not be printed: {error}", err=True)


@click.command(short_help="Move every weight a fraction of the way back.")
@click.argument("base", type=FolderOrName)
@click.argument("tuned", type=FolderOrFile)
@click.option("--out", type=FolderOrFile, required=True, help="Folder for the averaged copy; must not exist.")
@click.option("--alpha", type=float, default=0.1, help="The fraction of the way back to BASE, above 0, up to 1.")
@insist_option
@quiet_option
@json_option
@clear_errors
def average(base: str, tuned: Path, out: Path, alpha: float, insist: bool, quiet: bool, as_json: bool) -> None:
    """Move every weight of TUNED a fraction of the way back to BASE (WiSE-FT).

    BASE is what the tuning started from: a folder or a Hub model id. TUNED is a checkpoint folder or a LoRA adapter.
    """
    from routeguard.checkpoint.average import average_checkpoint

    with _ProgressBar(shown=not quiet and not as_json) as progress:
        report = average_checkpoint(base, tuned, out=out, alpha=alpha, insist=insist, progress=progress)
    _show(report, quiet=quiet, as_json=as_json)


@click.command(short_help="How far queries and keys moved, by layer and head.")
@click.argument("base", type=FolderOrName)
@click.argument("tuned", type=FolderOrFile)
@roles_option
@layers_option
@norms_option
@click.option("--routing", is_flag=True, help="Also the drift of each head's logit form.")
@click.option("--plot", type=FolderOrFile, help="Write a picture (PNG, SVG, PDF).")
@insist_option
@quiet_option
@json_option
@clear_errors
def drift(
    base: str,
    tuned: Path,
    roles: str,
    layers: str | None,
    norms: bool,
    routing: bool,
    plot: Path | None,
    insist: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Show how far TUNED's queries and keys moved from BASE, by layer, role and head. Reads only those rows.

    BASE is what the tuning started from: a folder, a Hub model id, or a guard's sidecar.
    """
    from routeguard.checkpoint.drift import checkpoint_drift

    with _ProgressBar(shown=not quiet and not as_json) as progress:
        found = checkpoint_drift(
            base,
            tuned,
            roles=parse_roles(roles),
            layers=parse_layers(layers),
            norms=norms,
            routing=routing,
            insist=insist,
            progress=progress,
        )
    if plot is not None:
        found.plot().savefig(plot, dpi=150)
    _show(found, quiet=quiet, as_json=as_json)
    if plot is not None and not quiet and not as_json:
        click.echo(f"picture: {plot}")


@click.command(short_help="Take back a restore that was made in place.")
@click.argument("folder", type=FolderOrFile)
@insist_option
@quiet_option
@json_option
@clear_errors
def undo(folder: Path, insist: bool, quiet: bool, as_json: bool) -> None:
    """Bring back every byte that `restore --in-place` wrote over, also after it was interrupted.

    FOLDER is the checkpoint that was restored in place.
    """
    from routeguard.checkpoint.in_place import undo_restore

    _show(undo_restore(folder, insist=insist), quiet=quiet, as_json=as_json)


def _method(name: str, ridge: float | None, alpha: float | None) -> Any:
    """The method with its setting. Raises ValueError for a setting of another method."""
    from routeguard.protect.modes import Interpolate, QKPro

    if ridge is not None and name != "qk_pro":
        raise ValueError(f"--ridge belongs to --method qk_pro, not to {name}")
    if alpha is not None and name != "interpolate":
        raise ValueError(f"--alpha belongs to --method interpolate, not to {name}")
    if ridge is not None:
        return QKPro(ridge=ridge)
    return name if alpha is None else Interpolate(alpha=alpha)


def _show(report: Any, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    elif not quiet:
        click.echo(str(report))


class _ProgressBar:
    """A bar on standard error for each stage, once the whole has taken longer than a second."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown and sys.stderr.isatty()
        self.started = time.monotonic()
        self.bar: Any = None
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.shown or time.monotonic() - self.started < 1:
            return
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done)
