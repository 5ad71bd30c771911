"""What every subcommand shares: options, clear errors, and reading what was typed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from routeguard.routes.collection import Role
from routeguard.routes.resolve import check_roles
from routeguard.storage.folder import tokenizer_files
from routeguard.versions import check_versions

FolderOrFile = click.Path(path_type=Path)

layers_option = click.option("--layers", metavar="3,7,11", help="Only these layers. Default: all of full attention.")
norms_option = click.option("--norms", is_flag=True, help="Also the gains of query and key norms.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
insist_option = click.option("--insist", is_flag=True, help="Go on although the check that refuses says no.")

FolderOrName = click.Path()  # of a Hub model too; stays a text

Function = TypeVar("Function", bound=Callable[..., Any])


def completing(*names: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For `shell_complete=`: the names that a shell offers. Unlike `click.Choice` it leaves refusing to the library."""
    return lambda context, parameter, typed: [name for name in names if name.startswith(typed)]


def clear_errors(function: Function) -> Function:
    """Bad input ends in exit code 2, a disk that fails in 3; a message on standard error, and no traceback."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (ValueError, ImportError) as error:
            fail(str(error), 2)
        except OSError as error:
            fail(str(error), 3)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's own; torch may not be imported at all
                raise
            fail(f"out of memory ({_reason(error)}); ask for fewer tokens or samples at a time", 2)

    return wrapped  # type: ignore[return-value]


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """What libraries print (DeepSpeed does, once it is imported) goes to standard error, which leaves results alone."""
    with redirect_stdout(sys.stderr):
        yield


def fail(message: str, code: int) -> None:
    """End the command with a message on standard error."""
    click.echo(f"routeguard: {message}", err=True)
    raise click.exceptions.Exit(code)


def parse_layers(text: str | None) -> list[int] | None:
    """Turn "3,7,11" into [3, 7, 11]; None stays None. Raises ValueError for anything else."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers {text!r} is not a list of layer indices like 3,7,11") from None


def parse_heads(text: str | None) -> dict[int, list[int]] | None:
    """Turn "3:0,2;7:1" into {3: [0, 2], 7: [1]}; None stays None. Raises ValueError for anything else."""
    if text is None:
        return None
    try:
        parts = [part.split(":") for part in text.split(";")]
        chosen: dict[int, list[int]] = {}
        for layer, heads in parts:
            chosen.setdefault(int(layer), []).extend(int(head) for head in heads.split(","))
        return chosen
    except ValueError:
        raise ValueError(f"--heads {text!r} is not of the form 3:0,2;7:1 (layer:heads;layer:heads)") from None


def parse_roles(text: str) -> tuple[Role, ...]:
    """Turn "query,key" into ("query", "key"). Raises ValueError, naming the choices, for anything else."""
    return check_roles(part.strip() for part in text.split(","))  # type: ignore[misc]


def parse_lengths(text: str, option: str = "--lengths") -> list[int]:
    """Turn "4k,8192" into [4096, 8192]; k is 1024. Raises ValueError for anything else."""
    lengths = []
    for part in text.lower().split(","):
        number, unit = (part.strip()[:-1], 1024) if part.strip().endswith("k") else (part.strip(), 1)
        if not number.isdigit() or int(number) == 0:
            raise ValueError(f"{option} {text!r} is not a list of lengths like 4k,8k,32768")
        lengths.append(int(number) * unit)
    return lengths


def read_file(path: Path, option: str) -> str:
    """Content of the text file that an option names; ValueError where it is none."""
    if not path.is_file():
        raise ValueError(f"{option} {path} is not a file")
    from routeguard.diagnostics.texts import read_text

    return read_text(path)


def refuse_no_place(path: Path, option: str) -> None:
    """Raise ValueError, before anything is measured, where a file could not be written to `path`."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{option}: {folder} is a file, not a folder; nothing can be written below it")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option}: no permission to write in {folder}")


@libraries_on_stderr()
def load_model(path: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, on the accelerator if there is one. Code in the folder never runs.

    Raises ValueError, naming the folder, for whatever keeps them from being loaded, and ImportError for libraries that
    are too old.
    """
    folder = Path(path)
    base = _refuse_no_model(folder)
    check_versions()
    import torch
    from transformers import AutoModelForCausalLM

    place = _device(device)
    tokenizer = load_tokenizer(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except Exception as error:  # damaged weights raise what their reader raises
        where = f"{folder}: its base model {base!r}" if base else f"{folder}: its model"
        raise ValueError(f"{where} cannot be loaded: {_reason(error)}") from None
    _refuse_other_vocabulary(folder, tokenizer, model)
    return model.to(torch.device(place)).eval(), tokenizer


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; ValueError, naming it, where there is none that can be loaded."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a folder with a tokenizer")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        reason = f"cannot be loaded: {_reason(error)}" if tokenizer_files(folder) else "is missing"
        raise ValueError(
            f"{folder}: its tokenizer {reason}; `tokenizer.save_pretrained({str(folder)!r})` puts one there"
        ) from None


def _refuse_no_model(folder: Path) -> str | None:
    """Raise ValueError for what is no folder with a model in it; gives an adapter's base model."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a model or adapter folder with its tokenizer")
    names = [name for name in ("adapter_config.json", "config.json") if (folder / name).is_file()]
    if not names:
        raise ValueError(f"{folder} holds no model: there is no config.json (or adapter_config.json) in it")
    try:
        config = json.loads((folder / names[0]).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / names[0]} is not JSON: {error}") from None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return base if names[0].startswith("adapter") and isinstance(base, str) else None


def _refuse_other_vocabulary(folder: Path, tokenizer: Any, model: Any) -> None:
    """Raise ValueError where the tokenizer has tokens that the model does not know; added ones may be for images."""
    size = model.get_input_embeddings().weight.shape[0]
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    largest = max((number for number in tokenizer.get_vocab().values() if number not in added), default=0)
    if largest >= size:
        raise ValueError(
            f"{folder}: its tokenizer has tokens up to {largest}, its model knows {size}: they do not belong together"
        )


def _reason(error: Exception) -> str:
    """The first line of an error's message, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _device(name: str | None) -> str:
    """The device that was asked for, or the accelerator if there is one. Raises ValueError if torch has it not."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(name).type == "meta":
            raise ValueError(f"--device {name!r} holds no numbers; give cpu, cuda or another that computes")
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return name


def reasoning_scores(before: float | None, after: float | None) -> tuple[float, float] | None:
    """`--reasoning-before` and `--reasoning-after`: both or neither; ValueError for one alone, and for no numbers."""
    if before is None and after is None:
        return None
    if before is None or after is None:
        raise ValueError("give --reasoning-before and --reasoning-after together")
    if not (math.isfinite(before) and math.isfinite(after)):
        raise ValueError("--reasoning-before and --reasoning-after are scores, such as 0.62")
    return before, after
