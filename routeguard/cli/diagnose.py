"""`routeguard diagnose …`: what happened to long-range attention, in tables, JSON and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from routeguard.cli.shared import (
    FolderOrFile,
    clear_errors,
    insist_option,
    json_option,
    layers_option,
    load_model,
    load_tokenizer,
    parse_layers,
    parse_lengths,
    read_file,
    refuse_no_place,
)

before_option = click.option("--before", type=FolderOrFile, help="The starting checkpoint, to compare with.")
text_option = click.option("--text", type=FolderOrFile, help="Text file to measure on. Default: built-in prose.")
plot_option = click.option("--plot", type=FolderOrFile, help="Write the picture to this file (.png, .pdf, .svg).")


@click.group(short_help="Why does recall fall? Tables and pictures.")
def diagnose() -> None:
    """Why does recall fall? Attention distance, routing pictures, layer importance, drift."""


@diagnose.command()
@click.argument("model", type=FolderOrFile)
@before_option
@text_option
@click.option("--tokens", type=click.IntRange(min=2), default=2048, help="Length of a sequence in tokens.")
@click.option("--sequences", type=click.IntRange(min=1), default=1, help="How many sequences.")
@click.option("--queries", type=click.IntRange(min=8), default=64, help="Queries computed in each sequence.")
@layers_option
@insist_option
@plot_option
@json_option
@clear_errors
def distance(
    model: Path,
    before: Path | None,
    text: Path | None,
    tokens: int,
    sequences: int,
    queries: int,
    layers: str | None,
    insist: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """How far back each head looks; with --before, which layers shortened, and what restoring Q/K gives back.

    MODEL is a checkpoint folder with its tokenizer.
    """
    from routeguard.diagnostics.distance import attention_distance
    from routeguard.diagnostics.distance_change import distance_change

    _check_plot(plot)
    options: dict[str, Any] = {"layers": parse_layers(layers), "num_queries": queries, "insist": insist}
    loaded, tokenizer = load_model(model)
    rows = _rows(tokenizer, text, tokens, sequences)

    def measure(candidate: Any) -> Any:
        return attention_distance(candidate, rows, **options)

    result = measure(loaded) if before is None else distance_change(_in_three_states(measure, loaded, before))
    _show(result, as_json=as_json, plot=plot)


@diagnose.command()
@click.argument("model", type=FolderOrFile)
@click.option("--layer", type=int, required=True, help="A full-attention layer.")
@click.option("--head", type=int, required=True, help="Query head, from 0.")
@before_option
@click.option("--task", help="Look at a sample of this recall task, needle and question marked.")
@click.option("--length", help="Its length in tokens, for example 8k. Default: 2k.")
@click.option("--depth", type=float, help="Where its needle stands, 0 to 1. Default: 0.5.")
@click.option("--seed", type=int, help="Which sample. Default: 0.")
@text_option
@click.option(
    "--tokens", type=click.IntRange(min=2), help="Without a task: length of the text in tokens. Default: 2048."
)
@insist_option
@plot_option
@json_option
@clear_errors
def picture(
    model: Path,
    layer: int,
    head: int,
    before: Path | None,
    task: str | None,
    length: str | None,
    depth: float | None,
    seed: int | None,
    text: Path | None,
    tokens: int | None,
    insist: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Where one head looks; with --before also before, restored, and the log-ratio of restored and after.

    MODEL is a checkpoint folder with its tokenizer. With --task the text is a question about a needle, which ends
    where the answer begins, and the share of attention that the answer's place gives to the needle is printed.
    """
    from routeguard.diagnostics.needle_prompt import needle_prompt
    from routeguard.diagnostics.routing_picture import attention_map, routing_picture

    _check_plot(plot)
    if task is None and (length, depth, seed) != (None, None, None):
        raise ValueError("--length, --depth and --seed belong to --task, which is not given")
    if task is not None and (text, tokens) != (None, None):
        raise ValueError("--text and --tokens choose a text, --task makes its own; give one or the other")
    sizes = parse_lengths(length or "2k", "--length")
    if len(sizes) > 1:
        raise ValueError(f"--length {length!r}: a picture is of one prompt; give one length")
    loaded, tokenizer = load_model(model)
    marks: dict[str, Any] = {}
    if task is None:
        rows = _rows(tokenizer, text, 2048 if tokens is None else tokens, 1)
    else:
        place = 0.5 if depth is None else depth
        prompt = needle_prompt(tokenizer, task=task, length_tokens=sizes[0], depth=place, seed=seed or 0)
        rows, marks = prompt.input_ids, prompt.marks

    def measure(candidate: Any) -> Any:
        return attention_map(candidate, rows, layer=layer, head=head, insist=insist)

    states = {"": measure(loaded)} if before is None else _in_three_states(measure, loaded, before)
    _show(routing_picture(states, marks=marks), as_json=as_json, plot=plot)


@diagnose.command()
@click.argument("model", type=FolderOrFile)
@click.option("--tasks", default="niah_single_2", help="Recall tasks, as for `routeguard recall`.")
@click.option("--lengths", default="2k", help="Context lengths in tokens, for example 1k,4k.")
@click.option("--samples", type=click.IntRange(min=1), default=20, help="Samples for each task and length.")
@click.option("--heads", is_flag=True, help="Leave out one head at a time, not whole layers.")
@layers_option
@insist_option
@plot_option
@json_option
@clear_errors
def importance(
    model: Path,
    tasks: str,
    lengths: str,
    samples: int,
    heads: bool,
    layers: str | None,
    insist: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Which full-attention layers (or heads) recall hangs on: leave each one out and measure again.

    MODEL is a checkpoint folder with its tokenizer.
    """
    from routeguard.diagnostics.importance import head_importance, layer_importance
    from routeguard.recall.measure import measure_recall

    _check_plot(plot)
    names, wanted, chosen = [name.strip() for name in tasks.split(",")], parse_lengths(lengths), parse_layers(layers)
    loaded, tokenizer = load_model(model)

    def score(candidate: Any) -> dict[str, float]:
        result = measure_recall(candidate, tokenizer, tasks=names, lengths=wanted, num_samples=samples, insist=insist)
        return {name: result.accuracy(task=name) for name in result.tasks}

    rank = head_importance if heads else layer_importance
    _show(rank(loaded, score, layers=chosen), as_json=as_json, plot=plot)


@diagnose.command()
@click.argument("run", type=FolderOrFile)
@plot_option
@json_option
@clear_errors
def drift(run: Path, plot: Path | None, as_json: bool) -> None:
    """How far the queries and keys of a guarded or tracked run moved, step by step.

    RUN is a guard's drift.jsonl, or a folder of a run that holds one.
    """
    from routeguard.diagnostics.drift_report import drift_report

    _check_plot(plot)
    _show(drift_report(run), as_json=as_json, plot=plot)


@click.command(short_help="How local is this training data?")
@click.argument("data", type=FolderOrFile)
@click.option("--tokenizer", type=FolderOrFile, help="Folder with a tokenizer.")
@click.option("--model", type=FolderOrFile, help="The model to train: also measure its gradient.")
@click.option("--column", help="Which field of a sample. Default: found out.")
@click.option("--max-lag", type=click.IntRange(min=1), default=512, help="Largest distance of the autocorrelation.")
@click.option("--tokens", type=click.IntRange(min=2), default=1024, help="Length of a sequence in tokens.")
@click.option("--sequences", type=click.IntRange(min=1), default=8, help="How many sequences.")
@click.option("--lengths", help="Distances to report, for example 512,4k,32k.")
@click.option("--threshold", default=0.01, help="Share below which nothing is reinforced.")
@insist_option
@plot_option
@json_option
@clear_errors
def locality(
    data: Path,
    tokenizer: Path | None,
    model: Path | None,
    column: str | None,
    max_lag: int,
    tokens: int,
    sequences: int,
    lengths: str | None,
    threshold: float,
    insist: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """How local is this data: W of its tokens, W of a model's gradient on it, and lengths that training leaves out.

    DATA is a JSONL, JSON, parquet or text file, or a folder of datasets.
    """
    from dataclasses import replace

    from routeguard.diagnostics.autocorrelation import MAX_TOKENS
    from routeguard.diagnostics.locality import LENGTHS
    from routeguard.diagnostics.locality import locality as measure
    from routeguard.diagnostics.sample_draw import draw_tokens

    _check_plot(plot)
    if tokenizer is None and model is None:
        raise ValueError("give --tokenizer FOLDER or --model FOLDER: the data must become tokens")
    wanted = LENGTHS if lengths is None else parse_lengths(lengths)
    loaded, found = load_model(model) if model is not None else (None, None)
    if tokenizer is not None:
        found = load_tokenizer(tokenizer)
    # Twice what the gradient takes: sequences without a label that counts are left out.
    enough = MAX_TOKENS if model is None else max(MAX_TOKENS, 2 * tokens * sequences)
    drawn = draw_tokens(data, found, max_tokens=enough, column=column, with_labels=model is not None)
    report = measure(
        drawn.documents,
        model=loaded,
        labels=drawn.labels,
        lengths=wanted,
        threshold=threshold,
        max_lag=max_lag,
        sequence_tokens=tokens,
        num_sequences=sequences,
        insist=insist,
    )
    report = replace(report, read=drawn.read)
    _show(report, as_json=as_json, plot=plot)


def _check_plot(path: Path | None) -> None:
    """Raise ValueError, before anything is measured, where the picture could not be written."""
    from routeguard.plots import check_plot

    check_plot(path)
    if path is not None:
        refuse_no_place(path, "--plot")


def _in_three_states(measure: Callable[[Any], Any], model: Any, before: Path) -> dict[str, Any]:
    """What `measure` says of the starting checkpoint, of the model, and of the model with its routing put back."""
    from routeguard.restoration.in_memory import restored

    start, _ = load_model(before)
    states = {"before": measure(start), "after": measure(model)}
    with restored(model, start):
        states["restored"] = measure(model)
    return states


def _rows(tokenizer: Any, text: Path | None, tokens: int, sequences: int) -> Any:
    from routeguard.diagnostics.texts import manual_text, token_rows

    content = manual_text() if text is None else read_file(text, "--text")
    return token_rows(tokenizer, content, num_tokens=tokens, num_sequences=sequences)


def _show(result: Any, *, as_json: bool, plot: Path | None) -> None:
    from routeguard.diagnostics.json_text import json_text

    click.echo(json_text(result.to_dict()) if as_json else str(result))
    if plot is not None:
        result.plot(plot)
        click.echo(f"picture: {plot}", err=True)
