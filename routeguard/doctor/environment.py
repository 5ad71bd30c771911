"""What is installed, against the bounds that routeguard's own metadata states."""

from __future__ import annotations

import platform
from importlib import metadata

from routeguard.doctor.findings import Finding
from routeguard.versions import Requirement, requirements, upgrade_command

_LISTED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


def check_environment() -> list[Finding]:
    """Python, the packages that routeguard needs or can use, and what torch computes on. Imports torch alone."""
    known = requirements()
    findings = [*_packages(known), *_python()]
    if not known:
        findings.append(
            Finding(
                "note",
                "environment",
                "routeguard is not installed here (a source tree), so nothing states which versions it needs",
                "pip install .",
            )
        )
    return [*findings, *_torch()]


def missing_extra(package: str) -> Finding | None:
    """An error where a config needs a package of an extra that is absent or too old; None if it is there."""
    found = next((r for r in requirements() if r.name == package), None)
    if found is None or found.fits:
        return None
    what = "is not installed" if found.installed is None else f"is {found.installed}, too old ({found.bound} is needed)"
    return Finding("error", "environment", f"the config needs {package}, which {what}", _command(found))


def _packages(known: tuple[Requirement, ...]) -> list[Finding]:
    findings = []
    needed = {r.name: r for r in known if not r.extra}
    shown = [f"{name} {needed[name].installed}" for name in _LISTED if name in needed and needed[name].fits]
    shown += [f"{r.name} {r.installed}" for r in known if r.extra and r.fits]
    findings.append(
        Finding("ok", "environment", f"Python {platform.python_version()}, {', '.join(shown)}".rstrip(", "))
    )
    for r in known:
        if r.fits:
            continue
        what = "is not installed" if r.installed is None else f"is {r.installed}; {r.name}{r.bound} is needed"
        if r.extra and r.installed is None:
            findings.append(Finding("note", "environment", f"{r.name} {what} (optional)", _command(r)))
        else:
            findings.append(Finding("error", "environment", f"{r.name} {what}", _command(r)))
    return findings


def _python() -> list[Finding]:
    from packaging.specifiers import SpecifierSet

    try:
        bound = metadata.metadata("routeguard")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return []
    version = platform.python_version()
    if SpecifierSet(bound or "").contains(version, prereleases=True):
        return []
    return [Finding("error", "environment", f"Python is {version}; {bound} is needed", "use a newer Python")]


def _torch() -> list[Finding]:
    try:
        import torch
    except ImportError:
        return []  # named as a missing package already
    if not torch.cuda.is_available():
        return [Finding("note", "environment", "torch sees no GPU here; training is looked at all the same")]
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    bf16 = "computes in bf16" if torch.cuda.is_bf16_supported() else "does not compute in bf16"
    return [Finding("ok", "environment", f"{torch.cuda.device_count()} GPU ({', '.join(sorted(names))}), {bf16}")]


def _command(r: Requirement) -> str:
    return f"pip install 'routeguard[{r.extra}]'" if r.extra and r.installed is None else upgrade_command([r])
