"""`routeguard restore`, `drift` and `undo`: repair and compare checkpoints on disk."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from routeguard.cli.shared import AsJson, Layers, Norms, clear_errors, parse_heads, parse_layers, parse_roles

checkpoints = typer.Typer(rich_markup_mode=None)

Base = Annotated[str, typer.Argument(help="What the tuning started from: a folder, a Hub model id, a guard's sidecar.")]
Tuned = Annotated[Path, typer.Argument(help="The tuned checkpoint or adapter folder.")]
Roles = Annotated[str, typer.Option("--roles", help="query,key by default; for ablations also value and output.")]
Insist = Annotated[bool, typer.Option("--insist", help="Go on although the check that refuses says no.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


@checkpoints.command()
@clear_errors
def restore(
    base: Base,
    tuned: Tuned,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the repaired copy; must not exist.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Change TUNED itself, with an undo file.")] = False,
    method: Annotated[str, typer.Option(help="qk (QK-Restore), qk_pro or interpolate.")] = "qk",
    ridge: Annotated[float | None, typer.Option(help="Of qk_pro, 0 to inf. Default 0.1.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Of interpolate, 0 to 1. Default 0.5.")] = None,
    roles: Roles = "query,key",
    layers: Layers = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Only these query heads: 3:0,2 or 3:0,2;7:1.")] = None,
    norms: Norms = False,
    insist: Insist = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Put the queries and keys of TUNED's full-attention layers back to those of BASE. All other bytes stay."""
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
        typer.echo(f"routeguard: {report.output} {done}; only its report could not be printed: {error}", err=True)


@checkpoints.command()
@clear_errors
def drift(
    base: Base,
    tuned: Tuned,
    roles: Roles = "query,key",
    layers: Layers = None,
    norms: Norms = False,
    routing: Annotated[bool, typer.Option("--routing", help="Also the drift of each head's logit form.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG, SVG, PDF).")] = None,
    insist: Insist = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Show how far TUNED's queries and keys moved from BASE, by layer, role and head. Reads only those rows."""
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
        typer.echo(f"picture: {plot}")


@checkpoints.command()
@clear_errors
def undo(
    folder: Annotated[Path, typer.Argument(help="A checkpoint that was restored in place.")],
    insist: Insist = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Bring back every byte that `restore --in-place` wrote over, also after it was interrupted."""
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
        typer.echo(json.dumps(report.to_dict(), indent=2))
    elif not quiet:
        typer.echo(str(report))


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
