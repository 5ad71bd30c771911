"""Read the documentation as a program: its code blocks, calls in running text, command lines and links."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import routeguard
from routeguard.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
)

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is that of its first line of code."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str | None = None) -> list[Block]:
    text = read(page) if text is None else text
    return [
        Block(page, text[: match.start()].count("\n") + 2, match[2], textwrap.dedent(match[3]))
        for match in _FENCE.finditer(text)
    ]


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def prose(page: str) -> str:
    return _FENCE.sub("", read(page))


def links(text: str) -> list[tuple[str, str]]:
    """Links that are no addresses: the file as it is written ("" for the page itself), and the heading's anchor."""
    return [(match[1], match[2] or "") for match in _LINK.finditer(_SPAN.sub("", _FENCE.sub("", text)))]


def dead_links(page: str, text: str | None = None) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    text = read(page) if text is None else text
    dead = []
    for file, anchor in links(text):
        target = (ROOT / page).parent / file
        if not target.exists() or (anchor and anchor not in anchors(target.read_text() if file else text)):
            dead.append(f"{file}#{anchor}" if anchor else file)
    return dead


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as the site and the repository's viewers make them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


# -- Python -----------------------------------------------------------------------------------------------------------


def wrong_names(code: str, known: dict[str, Any]) -> list[str]:
    """What the code imports from routeguard and is not there, and arguments that its functions do not take.

    `known` gets the imported names, so that the blocks of a page can be checked one after the other.
    """
    tree = ast.parse(code)
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "routeguard":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                try:
                    value = getattr(module, name.name)
                except AttributeError:
                    wrong.append(f"{node.module} has no {name.name!r}")
                else:
                    known[name.asname or name.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            wrong += _wrong_arguments(node, known)
    return wrong


def _wrong_arguments(call: ast.Call, known: dict[str, Any]) -> list[str]:
    if not isinstance(call.func, ast.Name) or call.func.id not in known:
        return []
    name, spread = call.func.id, any(isinstance(argument, ast.Starred) for argument in call.args)
    given = [argument for argument in call.args if not (isinstance(argument, ast.Constant) and argument.value is ...)]
    names = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    try:
        inspect.signature(known[name]).bind_partial(*([] if spread else given), **names)
    except TypeError as error:
        return [f"{name}(...): {error}"]
    return []


def calls_in_prose(page: str) -> Iterator[str]:
    """Code spans that are calls of public names, such as `restore(model, start, method=QKPro(ridge=0.1))`."""
    for match in _SPAN.finditer(prose(page)):
        text = " ".join(match[1].split()).replace("…", "...")
        if text.partition("(")[0] in routeguard.__all__ and "(" in text:
            yield text


# -- the command line -------------------------------------------------------------------------------------------------


def command_lines(block: Block) -> list[list[str]]:
    """The `routeguard` commands of a block, split as a shell does, without comments, pipes and redirections."""
    lines = block.code.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        if line.startswith("routeguard ") and block.language in ("", "bash", "console", "sh"):
            words = shlex.split(line, comments=True)
            ends = [number for number, word in enumerate(words) if word in (">", ">>", "|", "&&", ";")]
            found.append(words[1 : ends[0] if ends else None])
    return found


def commands_in_prose(page: str) -> Iterator[list[str]]:
    for match in _SPAN.finditer(prose(page)):
        words = match[1].split()
        if words[0] == "routeguard" and len(words) > 1:
            yield words[1:]


def parse_command(words: list[str], *, whole: bool = True) -> None:
    """Parse as the command line would, without running anything; click raises UsageError for what it would refuse.

    With `whole=False` arguments may be missing: running text names commands without them.
    """
    command: click.Command = app
    context = click.Context(app, info_name="routeguard")
    while isinstance(command, click.Group):
        if not words:
            if whole:
                raise click.UsageError(f"{context.command_path} needs a command")
            return
        if words[0].startswith("-"):
            command.make_parser(context).parse_args(list(words))
            return
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    if whole:
        command.make_context(context.info_name, list(words), parent=context.parent)
    else:
        command.make_parser(context).parse_args([*words, "X"])  # for an option that is named without its value
