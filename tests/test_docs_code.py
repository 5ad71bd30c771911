"""The documentation's code runs, its calls, commands and links are right."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

import routeguard
from tests.docs_pages import (
    PAGES,
    ROOT,
    Block,
    blocks,
    calls_in_prose,
    command_lines,
    commands_in_prose,
    dead_links,
    parse_command,
    python_blocks,
    wrong_names,
)
from tests.docs_stage import make_small, run_block, run_page

PUBLIC = {name: getattr(routeguard, name) for name in routeguard.__all__}
WITH_PYTHON = [page for page in PAGES if python_blocks(page)]
SHORTER = {"docs/diagnose.md": ("for seed in range(20)", "for seed in range(1)")}

each_page = pytest.mark.parametrize("page", PAGES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_small(monkeypatch)
    run_page(runnable(page), tmp_path, {})


def runnable(page: str) -> list[Block]:
    """The Python blocks of a page, shorter where that is said above."""
    found = python_blocks(page)
    long, short = SHORTER.get(page, ("", ""))
    assert any(long in block.code for block in found), f"{page} has no such line any more: take it out of SHORTER"
    return [replace(block, code=block.code.replace(long, short)) for block in found] if long else found


def test_a_block_that_fails_is_seen_with_its_line() -> None:
    good, bad = blocks("page.md", "text\n\n```python\nx = 1\n```\n\n```python\ny = x\nprint(y + absent)\n```\n")
    scope: dict[str, Any] = {}
    run_block(good, scope)
    with pytest.raises(NameError, match="absent") as caught:
        run_block(bad, scope)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == ("page.md", 9)


@each_page
def test_names_and_arguments_are_right(page: str) -> None:
    known = dict(PUBLIC)
    wrong = [f"{block}: {problem}" for block in python_blocks(page) for problem in wrong_names(block.code, known)]
    wrong += [f"{call}: {problem}" for call in calls_in_prose(page) for problem in wrong_names(call, dict(PUBLIC))]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "from routeguard import RouteGard",
        "from routeguard.demo.model import load_modle",
        "RouteGuard(protct='freeze')",
        "restore(model, start, 'qk')",
        "from routeguard import Anchor as A\nA(100, power=2)",
    ],
)
def test_a_wrong_name_or_argument_is_found(code: str) -> None:
    assert wrong_names(code, dict(PUBLIC))


@each_page
def test_command_lines_parse(page: str) -> None:
    for block in blocks(page):
        for words in command_lines(block):
            parse_command(words)
    for words in commands_in_prose(page):
        parse_command(words, whole=False)


@pytest.mark.parametrize("line", ["restor BASE TUNED", "restore BASE", "drift BASE TUNED --picture x.png", "gate a"])
def test_a_wrong_command_line_is_refused(line: str) -> None:
    (words,) = command_lines(Block("page.md", 1, "bash", f"routeguard {line}  # why\n"))
    with pytest.raises(click.UsageError):
        parse_command(words)


@each_page
def test_linked_files_and_headings_exist(page: str) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_found() -> None:
    text = (
        "# A heading, `code`\n[a](#a-heading-code) [b](#b) [c](freeze.md#cost) [d](thaw.md) ![e](e.png) [f](http://x)"
    )
    assert dead_links("docs/cards/anchor.md", text) == ["#b", "freeze.md#cost", "thaw.md", "e.png"]


@each_page
def test_other_commands_name_what_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page):
        if block.language in ("", "bash"):
            for target in re.findall(r"^make ([\w-]+)", block.code, re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{block}: make {target}"
            for script in re.findall(r"^python ((?:examples|benchmarks)/\S+)", block.code, re.MULTILINE):
                assert (ROOT / script).is_file(), f"{block}: {script}"
            for module in re.findall(r"^python -m ((?:benchmarks|routeguard)[\w.]*)", block.code, re.MULTILINE):
                place = ROOT / module.replace(".", "/")
                assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), f"{block}: {module}"


def test_documented_arguments_exist() -> None:
    """MkDocs does not check this where one line of a docstring is about several arguments."""
    wrong = []
    for name, value in PUBLIC.items():
        section = re.search(r"^( *)Args:\n((?:\1 .*\n|\n)+)", (inspect.getdoc(value) or "") + "\n", re.MULTILINE)
        if section is None:
            continue
        documented = re.findall(r"^    (\w+(?:, \w+)*):", section[2], re.MULTILINE)
        taken = inspect.signature(value).parameters
        wrong += [f"{name}: {a}" for line in documented for a in line.split(", ") if a not in taken]
    assert not wrong
