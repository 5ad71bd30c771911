"""Findings: one thing each that a look at a run brought up, how bad it is, and what to do about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import routeguard
from routeguard.routes.wording import as_printed

Level = Literal["ok", "note", "warning", "error"]
SCHEMA_VERSION = 1
LEVELS: tuple[Level, ...] = get_args(Level)
_PACKAGE = Path(routeguard.__file__).parent


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: "error" keeps the run from being guarded; "warning" lets it run, but not as one would think.
        about: "environment", "config", "model", "guard", "adapters", "optimizer", "engine" or "recall".
        text: what was found; lines after the first are detail.
        do: what to do about it, "" where the text says so or nothing is to be done.
    """

    level: Level
    about: str
    text: str
    do: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, and the lines that would guard this run.

    Attributes:
        findings: in the order in which they were made.
        settings: what was read from the config, as plain data; empty without one.
        held: what would be held, as numbers; empty if no model was looked at.
        lora: `target_modules` and `exclude_modules` of adapters beside routing; empty without adapters.
        recipe: lines of Python or YAML.
    """

    findings: tuple[Finding, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    recipe: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing keeps the run from being guarded."""
        return not self.of("error")

    def of(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "settings": dict(self.settings),
            "held": dict(self.held),
            "lora": dict(self.lora),
            "recipe": list(self.recipe),
        }

    def __str__(self) -> str:
        lines = []
        for level in LEVELS:
            found = self.of(level)
            if found:
                lines += [level, *(line for finding in found for line in _lines(finding)), ""]
        if self.recipe:
            lines += ["to guard this run", *(f"  {line}".rstrip() for line in self.recipe), ""]
        counts = ", ".join(f"{len(self.of(level))} {level}s" for level in ("error", "warning", "note"))
        return "\n".join([*lines, counts])

    _repr_pretty_ = as_printed


@contextmanager
def collecting(findings: list[Finding], about: str) -> Iterator[None]:
    """Turn what routeguard refuses (ValueError) or warns about inside into findings. What follows a refusal is left."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except ValueError as error:
            findings.append(Finding("error", about, str(error)))
    texts = [str(w.message) for w in caught if w.category is UserWarning and Path(w.filename).is_relative_to(_PACKAGE)]
    findings += [Finding("warning", about, text) for text in dict.fromkeys(texts)]


def listed(names: Sequence[str], limit: int = 12) -> str:
    """`a, b, c and 4 more`."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _lines(finding: Finding) -> list[str]:
    first, *rest = finding.text.splitlines()
    lines = [f"  {finding.about}: {first}", *(f"    {line.rstrip()}" for line in rest)]
    return [*lines, f"    -> {finding.do}"] if finding.do else lines
