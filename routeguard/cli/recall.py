"""`routeguard recall` and `routeguard gate`: measure recall, and fail where it fell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routeguard.cli.shared import AsJson, clear_errors, load_model, parse_lengths

if TYPE_CHECKING:
    from routeguard.recall.result import RecallResult

Tasks = Annotated[str, typer.Option("--tasks", help="Comma-separated, each also as NAME+reasoning.")]
Lengths = Annotated[str, typer.Option("--lengths", help="Context lengths in tokens, for example 4k,8k,32k.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Samples for each task and length.")]
Method = Annotated[str, typer.Option("--method", help="forced (one forward pass) or generated.")]
Chat = Annotated[bool, typer.Option("--chat", help="Use the tokenizer's chat template.")]
Text = Annotated[Path | None, typer.Option("--haystack", help="Text file to hide needles in. Default: built-in prose.")]
Reserve = Annotated[int | None, typer.Option("--reserve", help="Tokens kept for the answer; RULER's: 128.")]
Batch = Annotated[int, typer.Option("--batch-tokens", min=1, help="Most tokens in one forward pass.")]
Prefill = Annotated[int | None, typer.Option("--prefill", help="Read prompts in pieces of this many tokens.")]
Folder = Annotated[Path | None, typer.Option("--output", help="Folder for recall.json and recall.png; resumable.")]


@clear_errors
def recall(
    model: Annotated[str, typer.Argument(help="Model or adapter folder, with its tokenizer.")],
    tasks: Tasks = "niah_single_2,niah_single_3,niah_multikey_2",
    lengths: Lengths = "4k",
    samples: Samples = 20,
    method: Method = "forced",
    chat: Chat = False,
    haystack: Text = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same samples.")] = 0,
    reserve: Reserve = None,
    batch_tokens: Batch = 16384,
    prefill: Prefill = None,
    device: Annotated[str | None, typer.Option("--device", help="Default: cuda if there is one.")] = None,
    insist: Annotated[bool, typer.Option("--insist", help="Beyond the model's positions, too.")] = False,
    output: Folder = None,
    json: AsJson = False,
) -> None:
    """Measure recall by context length and depth, with RULER's tasks."""
    from routeguard.recall.measure import measure_recall

    wanted, names = parse_lengths(lengths), [name.strip() for name in tasks.split(",")]
    text = None if haystack is None else _read_text(haystack)
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
    if json:
        import json as json_module

        typer.echo(json_module.dumps(result.to_dict(), indent=1))
    else:
        typer.echo(str(result))
    if output is not None:
        _write(result, output)


@clear_errors
def gate(
    before: Annotated[Path, typer.Argument(help="recall.json, or its folder, from before the training.")],
    after: Annotated[Path, typer.Argument(help="The same measurement afterwards.")],
    max_drop: Annotated[float, typer.Option("--max-drop", help="Points of recall, 0 to 100.")] = 10.0,
    confidence: Annotated[float, typer.Option("--confidence", help="Per cent, one-sided.")] = 95.0,
    each_task: Annotated[bool, typer.Option("--each-task", help="Judge each task at each length, too.")] = False,
    reasoning_before: Annotated[float | None, typer.Option(help="A reasoning score of yours, to show beside.")] = None,
    reasoning_after: Annotated[float | None, typer.Option(help="The same score after the training.")] = None,
    json: AsJson = False,
) -> None:
    """Fail (exit code 1) if recall fell significantly, by --max-drop points or more, at any length."""
    from routeguard.recall.gate import gate as compare
    from routeguard.recall.result import RecallResult

    if (reasoning_before is None) != (reasoning_after is None):
        raise ValueError("give --reasoning-before and --reasoning-after together")
    report = compare(
        RecallResult.load(before),
        RecallResult.load(after),
        max_drop=max_drop / 100,
        confidence=confidence / 100,
        each_task=each_task,
        reasoning=None if reasoning_before is None or reasoning_after is None else (reasoning_before, reasoning_after),
    )
    if json:
        import json as json_module

        typer.echo(json_module.dumps(report.to_dict(), indent=1))
    else:
        typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"--haystack {path} is not a file")
    return path.read_text(encoding="utf-8")


def _tell(done: int, total: int, seconds: float) -> None:
    left = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    typer.echo(f"{done}/{total} samples, about {left} left", err=True)


def _write(result: RecallResult, folder: Path) -> None:
    result.save(folder / "recall.json")
    written = [folder / "recall.json"]
    try:
        result.plot(folder / "recall.png")
        written.append(folder / "recall.png")
    except ImportError as error:
        typer.echo(f"recall.png was not drawn: {error}", err=True)
    (folder / "recall.partial.jsonl").unlink(missing_ok=True)
    typer.echo(f"written: {', '.join(map(str, written))}", err=True)
