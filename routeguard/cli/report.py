"""`routeguard report`: a guarded run as one HTML page, a section of a model card, or JSON."""

from __future__ import annotations

from pathlib import Path

import click

from routeguard.cli.shared import FolderOrFile, clear_errors, json_option, reasoning_scores, refuse_no_place


@click.command(short_help="A guarded run as one HTML page or model-card section.")
@click.argument("run", type=FolderOrFile)
@click.option("--output", type=FolderOrFile, help="The page. Default: routeguard/report.html in RUN.")
@click.option("--recall-before", type=FolderOrFile, help="recall.json of `routeguard recall` before the training.")
@click.option("--recall-after", type=FolderOrFile, help="The same measurement after it.")
@click.option("--recall-restored", type=FolderOrFile, help="The same measurement after a restore.")
@click.option("--reasoning-before", type=float, help="A reasoning score of yours, to show beside.")
@click.option("--reasoning-after", type=float, help="The same score after the training.")
@click.option("--card", is_flag=True, help="Print a Markdown section for a model card instead of writing the page.")
@json_option
@clear_errors
def report(
    run: Path,
    output: Path | None,
    recall_before: Path | None,
    recall_after: Path | None,
    recall_restored: Path | None,
    reasoning_before: float | None,
    reasoning_after: float | None,
    card: bool,
    as_json: bool,
) -> None:
    """Write what a guarded run left as one HTML page: what was held, drift, recall, warnings, environment.

    RUN is the output folder of a run with RouteGuard or RecallProbe. Loads no model.
    """
    from routeguard.diagnostics.json_text import json_text
    from routeguard.recall.result import RecallResult
    from routeguard.report.card import render_card
    from routeguard.report.collect import collect_run
    from routeguard.report.page import render_page

    if card and as_json:
        raise ValueError("--card prints Markdown, --json prints JSON; give one of them")
    if output is not None and (card or as_json):
        raise ValueError("--output is for the page, which --card and --json do not write; redirect what they print")
    paths = {"before": recall_before, "after": recall_after, "restored": recall_restored}
    found = collect_run(
        run,
        recall={state: RecallResult.load(path) for state, path in paths.items() if path is not None},
        reasoning=reasoning_scores(reasoning_before, reasoning_after),
    )
    if as_json:
        click.echo(json_text(found.to_dict()))
    elif card:
        click.echo(render_card(found), nl=False)
    else:
        page = output or run / "routeguard" / "report.html"
        refuse_no_place(page, "--output")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render_page(found), encoding="utf-8")
        for warning in found.warnings:
            click.echo(f"warning: {warning}", err=True)
        click.echo(f"written: {page}")
