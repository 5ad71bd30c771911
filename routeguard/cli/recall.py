"""`routeguard recall` and `routeguard gate`: measure recall, and fail where it fell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from routeguard.cli.shared import (
    FolderOrFile,
    FolderOrName,
    clear_errors,
    insist_option,
    json_option,
    load_model,
    parse_lengths,
    read_file,
    reasoning_scores,
    refuse_no_place,
)

if TYPE_CHECKING:
    from routeguard.recall.result import RecallResult


@click.command(short_help="Measure recall by context length and depth.")
@click.argument("model", type=FolderOrName)
@click.option(
    "--tasks", default="niah_single_2,niah_single_3,niah_multikey_2", help="With commas; each also as NAME+reasoning."
)
@click.option("--lengths", default="4k", help="Context lengths in tokens, for example 4k,8k,32k.")
@click.option("--samples", type=click.IntRange(min=1), default=20, help="Samples for each task and length.")
@click.option(
    "--method",
    type=click.Choice(["forced", "generated"]),
    default="forced",
    help="One forward pass, or greedy decoding.",
)
@click.option("--chat", is_flag=True, help="Use the tokenizer's chat template.")
@click.option("--haystack", type=FolderOrFile, help="Text file to hide needles in. Default: built-in prose.")
@click.option("--seed", default=0, help="The same seed gives the same samples.")
@click.option("--reserve", type=click.IntRange(min=1), help="Tokens kept for the answer; RULER's: 128.")
@click.option("--batch-tokens", type=click.IntRange(min=1), default=16384, help="Most tokens in one forward pass.")
@click.option("--prefill", type=click.IntRange(min=1), help="Read prompts in pieces of this many tokens.")
@click.option("--device", help="Default: cuda if there is one.")
@insist_option
@click.option("--output", type=FolderOrFile, help="Folder for recall.json and recall.png; resumable.")
@json_option
@clear_errors
def recall(
    model: str,
    tasks: str,
    lengths: str,
    samples: int,
    method: str,
    chat: bool,
    haystack: Path | None,
    seed: int,
    reserve: int | None,
    batch_tokens: int,
    prefill: int | None,
    device: str | None,
    insist: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure recall by context length and depth, with RULER's tasks.

    MODEL is a model or adapter folder, with its tokenizer.
    """
    from routeguard.recall.haystack_use import chosen_haystack
    from routeguard.recall.measure import measure_recall
    from routeguard.recall.registry import find_tasks

    wanted, names = parse_lengths(lengths), [name.strip() for name in tasks.split(",")]
    text = None if haystack is None else read_file(haystack, "--haystack")
    chosen_haystack(text, find_tasks(names))  # refusals before the model is loaded
    if output is not None:
        refuse_no_place(output / "recall.json", "--output")
    loaded, tokenizer = load_model(model, device)
    result = measure_recall(
        loaded,
        tokenizer,
        tasks=names,
        lengths=wanted,
        num_samples=samples,
        method=method,  # type: ignore[arg-type]
        chat=chat,
        haystack=text,
        seed=seed,
        reserve_tokens=reserve,
        batch_tokens=batch_tokens,
        prefill_tokens=prefill,
        insist=insist,
        resume=None if output is None else output / "recall.partial.jsonl",
        progress=_tell,
    )
    # An adapter's model names its base; the result is of the folder that was given.
    result = replace(result, settings={**result.settings, "model": str(Path(model))})
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))
    if output is not None:
        _write(result, output)


@click.command(short_help="Fail if recall fell from one measurement to another.")
@click.argument("before", type=FolderOrFile)
@click.argument("after", type=FolderOrFile)
@click.option(
    "--max-drop", type=click.FloatRange(0, 100, min_open=True), default=10.0, help="Points of recall, above 0 to 100."
)
@click.option(
    "--confidence",
    type=click.FloatRange(50, 100, min_open=True, max_open=True),
    default=95.0,
    help="Per cent, one-sided, between 50 and 100.",
)
@click.option("--each-task", is_flag=True, help="Judge each task at each length, too.")
@click.option("--reasoning-before", type=float, help="A reasoning score of yours, to show beside.")
@click.option("--reasoning-after", type=float, help="The same score after the training.")
@json_option
@clear_errors
def gate(
    before: Path,
    after: Path,
    max_drop: float,
    confidence: float,
    each_task: bool,
    reasoning_before: float | None,
    reasoning_after: float | None,
    as_json: bool,
) -> None:
    """Fail (exit code 1) if recall fell significantly, by --max-drop points or more, at any length.

    BEFORE and AFTER are recall.json files, or their folders, of the same measurement before and after the training.
    """
    from routeguard.recall.gate import gate as compare
    from routeguard.recall.result import RecallResult

    report = compare(
        RecallResult.load(before),
        RecallResult.load(after),
        max_drop=max_drop / 100,
        confidence=confidence / 100,
        each_task=each_task,
        reasoning=reasoning_scores(reasoning_before, reasoning_after),
    )
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise click.exceptions.Exit(1)


def _tell(done: int, total: int, seconds: float) -> None:
    left = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    click.echo(f"{done}/{total} samples, about {left} left", err=True)


def _write(result: RecallResult, folder: Path) -> None:
    _keep_earlier(result, folder)
    result.save(folder / "recall.json")
    written = [folder / "recall.json"]
    try:
        result.plot(folder / "recall.png")
        written.append(folder / "recall.png")
    except ImportError as error:
        click.echo(f"recall.png was not drawn: {error}", err=True)
    (folder / "recall.partial.jsonl").unlink(missing_ok=True)
    click.echo(f"written: {', '.join(map(str, written))}", err=True)


def _keep_earlier(result: RecallResult, folder: Path) -> None:
    """Move an earlier result of another measurement aside, with its picture, and say so."""
    from routeguard.storage.aside import move_aside

    file = folder / "recall.json"
    if not file.exists():
        return
    try:
        if json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(result.to_dict())):
            return  # nothing would be lost
    except ValueError:  # damaged: kept all the same
        pass
    kept = [moved for name in ("recall.json", "recall.png") if (moved := move_aside(folder / name)) is not None]
    click.echo(f"kept what was there as {', '.join(map(str, kept))}", err=True)
