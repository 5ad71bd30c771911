"""What every subcommand shares: clear errors, and reading options."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from routeguard.routes.collection import Role
from routeguard.routes.resolve import check_roles

Layers = Annotated[str | None, typer.Option("--layers", help="Only these layers, for example 3,7,11.")]
Norms = Annotated[bool, typer.Option("--norms", help="Also the gains of query and key norms.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Function = TypeVar("Function", bound=Callable[..., Any])


def clear_errors(function: Function) -> Function:
    """Bad input ends in exit code 2, a disk that fails in 3; a message on standard error, and no traceback."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            typer.echo(f"routeguard: {error}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            typer.echo(f"routeguard: {error}", err=True)
            raise typer.Exit(3) from None

    return wrapped  # type: ignore[return-value]


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


def parse_lengths(text: str) -> list[int]:
    """Turn "4k,8192" into [4096, 8192]; k is 1024. Raises ValueError for anything else."""
    lengths = []
    for part in text.lower().split(","):
        number, unit = (part.strip()[:-1], 1024) if part.strip().endswith("k") else (part.strip(), 1)
        if not number.isdigit() or int(number) == 0:
            raise ValueError(f"--lengths {text!r} is not a list of lengths like 4k,8k,32768")
        lengths.append(int(number) * unit)
    return lengths


def load_model(path: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, on the accelerator if there is one. Code in the folder never runs."""
    if not Path(path).is_dir():
        raise ValueError(f"{path} is not a folder; give a model or adapter folder with its tokenizer")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except OSError as error:
        raise ValueError(f"{path} has no model that can be loaded: {str(error).splitlines()[0]}") from None
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval(), tokenizer
