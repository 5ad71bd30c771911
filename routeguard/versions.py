"""Whether the installed packages are as new as routeguard's own metadata asks; nothing of theirs is imported."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def check_versions() -> None:
    """Compare every installed dependency with the bound in routeguard's metadata; once in a process.

    A package that is not installed is left to the import that needs it, and so are the extras. Without metadata
    (a source tree that was never installed) nothing states the bounds, and nothing is checked.

    Raises:
        ImportError: naming each package that is too old, what was found and the command that helps.
    """
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("routeguard") or []
    except metadata.PackageNotFoundError:
        return
    needed, found = [], []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None:
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            needed.append(f"{requirement.name}{requirement.specifier}")
            found.append(f"{requirement.name} {installed}")
    if needed:
        quoted = " ".join(f"'{name}'" for name in needed)
        raise ImportError(
            f"routeguard needs {', '.join(needed)}, but found {', '.join(found)}; "
            f"upgrade with: pip install --upgrade {quoted}"
        )
