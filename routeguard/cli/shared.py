"""What every subcommand shares: options, clear errors, and reading what was typed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from routeguard.routes.collection import Role
from routeguard.routes.resolve import check_roles

FolderOrFile = click.Path(path_type=Path)

layers_option = click.option("--layers", metavar="3,7,11", help="Only these layers. Default: all of full attention.")
norms_option = click.option("--norms", is_flag=True, help="Also the gains of query and key norms.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
insist_option = click.option("--insist", is_flag=True, help="Go on although the check that refuses says no.")

Function = TypeVar("Function", bound=Callable[..., Any])


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

    return wrapped  # type: ignore[return-value]


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


def load_model(path: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, on the accelerator if there is one. Code in the folder never runs."""
    if not Path(path).is_dir():
        raise ValueError(f"{path} is not a folder; give a model or adapter folder with its tokenizer")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = _device(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except OSError as error:
        raise ValueError(f"{path} has no model that can be loaded: {str(error).splitlines()[0]}") from None
    return model.to(torch.device(place)).eval(), tokenizer


def _device(name: str | None) -> str:
    """The device that was asked for, or the accelerator if there is one. Raises ValueError if torch has it not."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return name
