"""The site: pages that are generated are current, the reference is complete, links from outside `docs/` are right."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import routeguard
from routeguard.cli.document import document
from routeguard.protect.modes import (
    L2SP,
    Anchor,
    AtEnd,
    Average,
    Freeze,
    Interpolate,
    LowLR,
    Protection,
    QKPro,
    QKRestore,
    Track,
)
from tests.docs_pages import PAGES, ROOT, links, read

CARD_PARTS = ("**What it does.**", "**When to use", "**When not.**", "**Cost.**", "**Evidence.**")
CARDS = {
    Freeze: "freeze",
    LowLR: "low-lr",
    Anchor: "anchor",
    L2SP: "l2-sp",
    Track: "track",
    QKRestore: "qk-restore",
    QKPro: "qk-pro",
    Interpolate: "interpolate",
    Average: "average",
}
OTHER_CARDS = ("replay", "lora-targets", "state-transition")


@pytest.fixture(scope="module")
def hooks() -> Any:
    """The site's hooks, loaded as MkDocs does: from their file."""
    spec = importlib.util.spec_from_file_location("outside_pages", ROOT / "docs" / "_hooks" / "outside_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_line_page_is_current() -> None:
    assert read("docs/command-line.md") == document(), "run: python -m routeguard.cli.document > docs/command-line.md"


def test_every_command_and_option_is_on_its_page() -> None:
    page = read("docs/command-line.md")
    assert "### routeguard diagnose distance\n" in page and "| `--before PATH` |" in page
    assert "[default: 10.0; 0<x<=100]" in page and "[forced\\|generated]" in page


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [read(page) for page in PAGES if page.startswith("docs/api/")]
    named = re.findall(r"^::: routeguard\.(\S+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(name for name in named if "." not in name) == sorted(set(routeguard.__all__) - {"__version__"})


def test_every_mode_has_a_card_with_every_part() -> None:
    assert set(CARDS) == {*get_args(Protection), *get_args(AtEnd)}
    index = read("docs/cards/index.md")
    for name in [*CARDS.values(), *OTHER_CARDS]:
        card = read(f"docs/cards/{name}.md")
        assert f"({name}.md)" in index
        assert [part for part in CARD_PARTS if part not in card] == [], name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if not re.search(rf"[ ]{re.escape(page)}$", navigation, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("source", "place", "link", "expected"),
    [
        ("docs/scale.md", "scale.md", "../examples/engines/README.md", "examples/engines/README.md"),
        ("docs/scale.md", "scale.md", "../examples/engines", "examples/engines/README.md"),
        ("docs/a.md", "a.md", "../examples/real_model.py", "examples/real_model.py.md"),
        ("docs/cards/freeze.md", "cards/freeze.md", "../demo.md#every-mode", "../demo.md#every-mode"),
        ("docs/evidence/README.md", "evidence/README.md", "results", "results/README.md"),
        ("examples/engines/README.md", "examples/engines/README.md", "../../docs/scale.md#a", "../../scale.md#a"),
        ("CHANGELOG.md", "changelog.md", "docs/guard.md", "guard.md"),
        ("docs/a.md", "a.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/index.md", "index.md", "https://arxiv.org/abs/1", "https://arxiv.org/abs/1"),
        ("docs/index.md", "index.md", "#where-to-go", "#where-to-go"),
    ],
)
def test_links_are_written_for_the_site(hooks: Any, source: str, place: str, link: str, expected: str) -> None:
    text = "see [it]({}) and\n```\n[code]({})\n```\n"
    assert hooks.relinked(text.format(link, link), source, place) == text.format(expected, link)


def test_files_that_the_site_has_not_are_named_without_a_link(hooks: Any) -> None:
    text = "[`make`](Makefile), [gone](Makefil), ![picture](docs/demo-recall.png)"
    changed = "`make`, [gone](Makefil), ![picture](demo-recall.png)"
    assert hooks.relinked(text, "CONTRIBUTING.md", "contributing.md") == changed


def test_pages_from_outside_link_to_pages_of_the_site(hooks: Any) -> None:
    pages = hooks.outside_pages()
    some = {"changelog.md", "examples/README.md", "examples/engines/sft.py.md", "evidence/results/README.md"}
    assert some <= set(pages)
    known = {*pages, *(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.*"))}
    for place, (source, markdown) in pages.items():
        for match in re.finditer(r"\]\(([^)\s#:]+)\)", hooks.relinked(markdown, source, place).split("```")[0]):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1]))
            assert target in known, f"{place}: {match[1]}"


def test_an_example_is_shown_whole(hooks: Any) -> None:
    source, markdown = hooks.outside_pages()["examples/engines/sft.py.md"]
    assert source == "examples/engines/sft.py" and Path(ROOT / source).read_text() in markdown


def test_every_page_is_reached_from_another() -> None:
    """A page that only the navigation knows is not found by who reads the files."""
    reached = {"docs/index.md"}
    for page in PAGES:
        reached |= {posixpath.normpath(posixpath.join(posixpath.dirname(page), file)) for file, _ in links(read(page))}
    assert [page for page in PAGES if page.startswith("docs/") and page not in reached] == []


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<a href="https://arxiv.org/abs/1">paper</a> <script src="../a.js"></script>', []),
        ('<script async src="https://x.org/a.js"></script>', ["https://x.org/a.js"]),
        ('<link rel="stylesheet" href="//x.org/a.css">', ["//x.org/a.css"]),
        ('<img alt="a" src="http://x.org/a.png">', ["http://x.org/a.png"]),
    ],
)
def test_what_a_page_would_fetch_from_the_net_is_found(hooks: Any, html: str, found: list[str]) -> None:
    assert hooks.fetched(html) == found
