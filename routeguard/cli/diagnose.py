"""`routeguard diagnose …`: what happened to long-range attention, in tables, JSON and pictures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from routeguard.cli.shared import AsJson, Layers, clear_errors, load_model, parse_layers, parse_lengths

diagnose = typer.Typer(
    name="diagnose",
    help="Why does recall fall? Attention distance, locality, routing pictures, layer importance, drift.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Model = Annotated[Path, typer.Argument(help="The model: a checkpoint folder with its tokenizer.")]
Before = Annotated[Path | None, typer.Option("--before", help="The starting checkpoint, to compare with.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="Text file to measure on. Default: built-in prose.")]
Tokens = Annotated[int, typer.Option("--tokens", help="Length of a sequence in tokens.")]
Sequences = Annotated[int, typer.Option("--sequences", help="How many sequences.")]
Insist = Annotated[bool, typer.Option("--insist", help="Beyond the model's positions, too.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write the picture to this file (.png, .pdf, .svg).")]


@diagnose.command()
@clear_errors
def distance(
    model: Model,
    before: Before = None,
    text: TextFile = None,
    tokens: Tokens = 2048,
    sequences: Sequences = 1,
    queries: Annotated[int, typer.Option("--queries", help="Queries computed in each sequence.")] = 64,
    layers: Layers = None,
    insist: Insist = False,
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """How far back each head looks; with --before, which layers shortened, and what restoring Q/K gives back."""
    from routeguard.diagnostics.distance import attention_distance
    from routeguard.diagnostics.distance_change import distance_change
    from routeguard.diagnostics.plots import check_plot
    from routeguard.restoration.in_memory import restored

    check_plot(plot)
    loaded, tokenizer = load_model(model)
    rows = _rows(tokenizer, text, tokens, sequences)
    options: dict[str, Any] = {"layers": parse_layers(layers), "num_queries": queries, "insist": insist}
    if before is None:
        result: Any = attention_distance(loaded, rows, **options)
    else:
        start, _ = load_model(before)
        states = {"before": attention_distance(start, rows, **options)}
        states["after"] = attention_distance(loaded, rows, **options)
        with restored(loaded, start):
            states["restored"] = attention_distance(loaded, rows, **options)
        result = distance_change(states)
    _show(result, json=json, plot=plot)


@diagnose.command()
@clear_errors
def picture(
    model: Model,
    layer: Annotated[int, typer.Option("--layer", help="A full-attention layer.")],
    head: Annotated[int, typer.Option("--head", help="Query head, from 0.")],
    before: Before = None,
    text: TextFile = None,
    tokens: Tokens = 2048,
    insist: Insist = False,
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """Where one head looks; with --before also before, restored, and the log-ratio of restored and after."""
    from routeguard.diagnostics.plots import check_plot
    from routeguard.diagnostics.routing_picture import attention_map, routing_picture
    from routeguard.restoration.in_memory import restored

    check_plot(plot)
    loaded, tokenizer = load_model(model)
    rows = _rows(tokenizer, text, tokens, 1)
    if before is None:
        states = {"": attention_map(loaded, rows, layer=layer, head=head, insist=insist)}
    else:
        start, _ = load_model(before)
        states = {"before": attention_map(start, rows, layer=layer, head=head, insist=insist)}
        states["after"] = attention_map(loaded, rows, layer=layer, head=head, insist=insist)
        with restored(loaded, start):
            states["restored"] = attention_map(loaded, rows, layer=layer, head=head, insist=insist)
    _show(routing_picture(states), json=json, plot=plot)


@diagnose.command()
@clear_errors
def importance(
    model: Model,
    tasks: Annotated[str, typer.Option("--tasks", help="Recall tasks, as for `routeguard recall`.")] = "niah_single_2",
    lengths: Annotated[str, typer.Option("--lengths", help="Context lengths in tokens, for example 1k,4k.")] = "2k",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples for each task and length.")] = 20,
    heads: Annotated[bool, typer.Option("--heads", help="Leave out one head at a time, not whole layers.")] = False,
    layers: Layers = None,
    insist: Insist = False,
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """Which full-attention layers (or heads) recall hangs on: leave each one out and measure again."""
    from routeguard.diagnostics.importance import head_importance, layer_importance
    from routeguard.diagnostics.plots import check_plot
    from routeguard.recall.measure import measure_recall

    check_plot(plot)
    loaded, tokenizer = load_model(model)
    names, wanted = [name.strip() for name in tasks.split(",")], parse_lengths(lengths)

    def score(candidate: Any) -> dict[str, float]:
        result = measure_recall(candidate, tokenizer, tasks=names, lengths=wanted, num_samples=samples, insist=insist)
        return {name: result.accuracy(task=name) for name in result.tasks}

    rank = head_importance if heads else layer_importance
    _show(rank(loaded, score, layers=parse_layers(layers)), json=json, plot=plot)


@diagnose.command()
@clear_errors
def drift(
    run: Annotated[Path, typer.Argument(help="A guard's drift.jsonl, or a folder of a run that holds one.")],
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """How far the queries and keys of a guarded or tracked run moved, step by step."""
    from routeguard.diagnostics.drift_report import drift_report
    from routeguard.diagnostics.plots import check_plot

    check_plot(plot)
    _show(drift_report(run), json=json, plot=plot)


@clear_errors
def locality(
    data: Annotated[Path, typer.Argument(help="JSONL, JSON, parquet or text file, or a folder of datasets.")],
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Folder with a tokenizer.")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="The model to train: also measure its gradient.")
    ] = None,
    column: Annotated[str | None, typer.Option("--column", help="Which field of a sample. Default: found out.")] = None,
    max_lag: Annotated[int, typer.Option("--max-lag", help="Largest distance of the autocorrelation.")] = 512,
    tokens: Tokens = 1024,
    sequences: Sequences = 8,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Distances to report, for example 512,4k,32k.")
    ] = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Share below which nothing is reinforced.")] = 0.01,
    insist: Insist = False,
    plot: Plot = None,
    json: AsJson = False,
) -> None:
    """How local is this data: W of its tokens, W of a model's gradient on it, and lengths that training leaves out."""
    from routeguard.diagnostics.locality import LENGTHS
    from routeguard.diagnostics.locality import locality as measure
    from routeguard.diagnostics.plots import check_plot
    from routeguard.diagnostics.sample_layouts import sample_labels, sample_tokens
    from routeguard.diagnostics.texts import read_samples

    check_plot(plot)
    if tokenizer is None and model is None:
        raise ValueError("give --tokenizer FOLDER or --model FOLDER: the data must become tokens")
    if tokenizer is not None and not tokenizer.is_dir():
        raise ValueError(f"{tokenizer} is not a folder; give a folder with a tokenizer")
    loaded, found = load_model(model) if model is not None else (None, None)
    if tokenizer is not None or found is None:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(tokenizer)
    samples = read_samples(data)
    documents = sample_tokens(found, samples, column=column)
    report = measure(
        documents,
        model=loaded,
        labels=None if column else sample_labels(found, samples, documents),
        lengths=LENGTHS if lengths is None else parse_lengths(lengths),
        threshold=threshold,
        max_lag=max_lag,
        sequence_tokens=tokens,
        num_sequences=sequences,
        insist=insist,
    )
    _show(report, json=json, plot=plot)


def _rows(tokenizer: Any, text: Path | None, tokens: int, sequences: int) -> Any:
    from routeguard.diagnostics.texts import builtin_prose, read_text, token_rows

    if text is not None and not text.is_file():
        raise ValueError(f"{text} is not a file")
    content = builtin_prose() if text is None else read_text(text)
    return token_rows(tokenizer, content, num_tokens=tokens, num_sequences=sequences)


def _show(result: Any, *, json: bool, plot: Path | None) -> None:
    if json:
        import json as json_module

        typer.echo(json_module.dumps(_finite(result.to_dict()), indent=2, allow_nan=False))
    else:
        typer.echo(str(result))
    if plot is not None:
        result.plot(plot)
        typer.echo(f"picture: {plot}", err=True)


def _finite(value: Any) -> Any:
    """The same data with None for infinite and undefined numbers, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
