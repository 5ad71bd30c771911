"""Pages of the site whose text lives outside `docs/`: the changelog, the examples, ... MkDocs calls the three hooks.

Links are written so that they work where the files lie, in the repository; `site_path` says where the site has them.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".txt": "text"}
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
_WHOLE_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(?:#[^)\s]*)?\)")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FETCHED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\s(?:src|href)="((?:https?:)?//[^"]+)""")
_FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def site_path(path: str) -> str | None:
    """Where the site has the file or folder at `path` (relative to the repository); None where it has it not."""
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return f"{inside}/README.md" if (ROOT / path).is_dir() else inside
    if path == "examples" or path.startswith("examples/"):
        if (ROOT / path).is_dir():
            return f"{path}/README.md"
        return path if path.endswith(".md") else f"{path}.md"
    return "index.md" if path == "README.md" else BESIDE.get(path)


def relinked(markdown: str, source: str, place: str) -> str:
    """`markdown` of the repository's file `source`, with its links as they must be in the site's page `place`.

    Files that the site has not are named without a link.
    """

    def target(link: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))

    def unlinked(match: re.Match[str]) -> str:
        absent = site_path(target(match[2])) is None and (ROOT / target(match[2])).exists()
        return match[1] if absent else match[0]

    def link(match: re.Match[str]) -> str:
        found = site_path(target(match[1]))
        if found is None:
            return match[0]
        return posixpath.relpath(found, posixpath.dirname(place) or ".") + (match[2] or "")

    parts = _FENCED.split(markdown)
    parts[::2] = [_LINK.sub(link, _WHOLE_LINK.sub(unlinked, part)) for part in parts[::2]]
    return "".join(parts)


def outside_pages() -> dict[str, tuple[str, str]]:
    """Place in the site of every page from outside: the repository's file or folder it is of, and its Markdown."""
    pages = {place: (name, (ROOT / name).read_text(encoding="utf-8")) for name, place in BESIDE.items()}
    folders = {"docs/evidence/results"}
    for path in sorted((ROOT / "examples").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if "__pycache__" in name or path.is_dir():
            continue
        folders.add(posixpath.dirname(name))
        place = site_path(name)
        assert place is not None
        if path.suffix == ".md":
            pages[place] = (name, path.read_text(encoding="utf-8"))
        elif path.suffix in LANGUAGES:
            pages[place] = (name, _shown(path))
    for folder in sorted(folders):
        place = site_path(folder)
        assert place is not None
        if place in pages:
            source, text = pages[place]
            pages[place] = (source, f"{text}\n## Files\n\n{_listing(folder)}")
        else:
            pages[place] = (folder + "/", f"# {folder.removeprefix('docs/').capitalize()}\n\n{_listing(folder)}")
    return pages


def _shown(path: Path) -> str:
    """A file of code as a page: what it says it is, then its text."""
    code = path.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(code)) if path.suffix == ".py" else None
    first = (about or "").splitlines()[:1]
    return f"# {path.name}\n\n" + "".join(f"{line}\n\n" for line in first) + f"```{LANGUAGES[path.suffix]}\n{code}```\n"


def _listing(folder: str) -> str:
    """The files and folders in a folder, with the first line of what each says it is."""
    lines = []
    for path in sorted((ROOT / folder).iterdir()):
        if path.name.startswith((".", "_")) or path.name == "README.md":
            continue
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.suffix == ".py" else None
        said = ": " + about.splitlines()[0] if about else ""
        lines.append(f"- [{path.name}{'/' * path.is_dir()}]({path.name}){said}")
    return "\n".join(lines) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: add the pages from outside."""
    from mkdocs.structure.files import File

    for place, (_, markdown) in outside_pages().items():
        files.append(File.generated(config, place, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs' hook: write links for the site."""
    place = page.file.src_uri
    source = outside_pages()[place][0] if page.file.generated_by else f"docs/{place}"
    return relinked(markdown, source, place)


def fetched(html: str) -> list[str]:
    """Addresses that a browser would fetch from the net to show this page."""
    return _FETCHED.findall(html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """MkDocs' hook: end the build where a page would fetch something from the net."""
    if fetched(output):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri} would fetch {', '.join(fetched(output))}; keep it in docs/assets")
    return output
