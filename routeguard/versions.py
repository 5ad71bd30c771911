"""What routeguard's own metadata asks of other packages, and what is installed; nothing of theirs is imported."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata

_FOR_DEVELOPERS = ("dev", "docs")


@dataclass(frozen=True)
class Requirement:
    """One package that the metadata names.

    Attributes:
        name: of the distribution.
        bound: such as ">=2.6"; "" for any version.
        extra: the extra that brings it ("quant"), "" for a dependency of routeguard itself.
        installed: the installed version, None if there is none.
        fits: whether the installed version is within the bound; False if none is installed.
    """

    name: str
    bound: str
    extra: str
    installed: str | None
    fits: bool


def requirements() -> tuple[Requirement, ...]:
    """What the metadata asks for, extras included but those for developers; empty where there is no metadata.

    There is none in a source tree that was never installed. What another system needs (a marker) is left out.
    """
    from packaging.requirements import Requirement as Line

    try:
        lines = metadata.requires("routeguard") or []
        extras = metadata.metadata("routeguard").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return ()
    found = []
    for line in map(Line, lines):
        if line.name == "routeguard":
            continue
        wanted = ("", *(extra for extra in extras if extra not in _FOR_DEVELOPERS))
        extra = next((e for e in wanted if line.marker is None or line.marker.evaluate({"extra": e})), None)
        if extra is None:
            continue
        installed = _installed(line.name)
        fits = installed is not None and line.specifier.contains(installed, prereleases=True)
        found.append(Requirement(line.name, str(line.specifier), extra, installed, fits))
    return tuple(found)


@cache
def check_versions() -> None:
    """Compare every installed dependency with the bound in routeguard's metadata; once in a process.

    A package that is not installed is left to the import that needs it, and so are the extras. Without metadata
    nothing states the bounds, and nothing is checked.

    Raises:
        ImportError: naming each package that is too old, what was found and the command that helps.
    """
    old = [r for r in requirements() if not r.extra and r.installed is not None and not r.fits]
    if old:
        needed = [f"{r.name}{r.bound}" for r in old]
        raise ImportError(
            f"routeguard needs {', '.join(needed)}, but found {', '.join(f'{r.name} {r.installed}' for r in old)}; "
            f"upgrade with: {upgrade_command(old)}"
        )


def upgrade_command(old: list[Requirement]) -> str:
    """The pip command that brings packages up to their bounds."""
    quoted = " ".join(f"'{r.name}{r.bound}'" for r in old)
    return f"pip install --upgrade {quoted}"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
