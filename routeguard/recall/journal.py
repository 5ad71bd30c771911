"""Scores on disk as they come, so that a measurement can go on where it was stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from routeguard.recall.scores import SampleScore

SCHEMA_VERSION = 1


class Journal:
    """A JSONL file: a header line with the settings, then one score a line.

    Args:
        path: the file; it is made with its folder if it is not there.
        settings: what the scores belong to.

    Raises ValueError if the file belongs to another model or other settings, or is damaged before its last line.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.known: dict[tuple[str, int, int], SampleScore] = {}
        header = json.loads(json.dumps({"schema_version": SCHEMA_VERSION, "settings": settings}))
        if path.is_file() and path.stat().st_size:
            self._read(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def append(self, scores: Iterable[SampleScore]) -> None:
        """Write scores and flush them to the operating system."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(score.to_dict()) + "\n" for score in scores)

    def _read(self, header: dict[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        try:
            found = json.loads(lines[0])
        except json.JSONDecodeError:
            raise ValueError(f"{self.path} is not a recall journal; name another file") from None
        if found != header:
            theirs = found.get("settings", {}) if isinstance(found, dict) else {}
            changed = [n for n, v in header["settings"].items() if theirs.get(n) != v] or ["schema_version"]
            raise ValueError(
                f"{self.path} was begun with another {', '.join(changed)}; go on with the same call, or delete the file"
            )
        whole = [lines[0]]
        for number, line in enumerate(lines[1:], start=2):
            if not line:
                continue
            try:
                score = SampleScore.from_dict(json.loads(line))
            except json.JSONDecodeError:
                if number == len(lines):
                    break  # the half-written end of a killed run
                raise ValueError(f"{self.path}, line {number} is damaged") from None
            self.known[score.task, score.length_tokens, score.index] = score
            whole.append(line)
        if len(lines) and lines[-1]:  # cut the half line off, or the next one would be glued to it
            self.path.write_text("\n".join(whole) + "\n", encoding="utf-8")


def fingerprint(model: Any) -> str:
    """A short hash of a model's parameters: names, shapes, and 64 entries of each, spread evenly."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // 64)
        entries = flat[::step][:64].to("cpu").contiguous()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(entries.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
