"""Scores on disk as they come, so that a measurement can go on where it was stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from routeguard.recall.model_config import model_config
from routeguard.recall.sample import Sample
from routeguard.recall.scores import SampleScore

SCHEMA_VERSION = 2
_PIECE = 1 << 24  # entries that are hashed at a time


class Journal:
    """A JSONL file: a header line with the settings, then one score a line, with the hash of its sample's tokens.

    Args:
        path: the file; it is made with its folder if it is not there.
        settings: what the scores belong to.

    Raises ValueError if the file belongs to another model or other settings, or is damaged before its last line.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._known: dict[str, SampleScore] = {}
        header = json.loads(json.dumps({"schema_version": SCHEMA_VERSION, "settings": settings}))
        if path.is_file() and path.stat().st_size:
            self._read(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(header)
        self._numbers = {_number(score) for score in self._known.values()}

    def score_of(self, sample: Sample) -> SampleScore | None:
        """The score of this very sample (its prompt's and answer's tokens), or None.

        Raises ValueError if the file holds one of the same number and other tokens: it belongs to another measurement.
        """
        score = self._known.get(sample.key)
        if score is not None and _number(score) == _number(sample):
            return score
        if _number(sample) in self._numbers:
            raise ValueError(
                f"{self.path} was begun with other samples: number {sample.index} of {sample.task} at "
                f"{sample.length_tokens} tokens has other tokens there, so the haystack, the tokenizer, its chat "
                "template or the task has changed; go on with the same call, or delete the file"
            )
        return None

    def append(self, scores: Iterable[SampleScore]) -> None:
        """Write scores and flush them to the operating system."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(score.to_dict()) + "\n" for score in scores)

    def _begin(self, header: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def _read(self, header: dict[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        try:
            found = json.loads(lines[0])
        except json.JSONDecodeError:
            raise ValueError(f"{self.path} is not a recall journal; name another file") from None
        if found != header:
            theirs = found.get("settings", {}) if isinstance(found, dict) else {}
            if theirs and not any(lines[1:]):  # begun and stopped before the first score: nothing would be lost
                self._begin(header)
                return
            raise ValueError(
                f"{self.path} was begun with other settings ({_changes(theirs, header['settings'])}); go on with the "
                "same call, or delete the file"
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
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: {error}") from None
            self._known[score.key] = score
            whole.append(line)
        if len(lines) and lines[-1]:  # cut the half line off, or the next one would be glued to it
            self.path.write_text("\n".join(whole) + "\n", encoding="utf-8")


def _changes(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """What differs between two settings, in words."""
    changed = [name for name, value in ours.items() if theirs.get(name) != value]
    words = [
        "another model, by its weights or configuration"
        if name == "fingerprint"
        else f"{name} was {theirs.get(name)!r} and is {ours[name]!r}"
        for name in changed
    ]
    return "; ".join(words) or "schema_version"


def fingerprint(model: Any) -> str:
    """A short hash of what a model computes: its configuration, and every byte of its parameters and buffers.

    Reads all weights once, tensor by tensor; seconds for each billion parameters.
    """
    import torch

    digest = hashlib.sha256(type(model).__name__.encode())
    adapters = getattr(model, "peft_config", None) or {}  # their scales are in no tensor
    for config in (model_config(model), *adapters.values()):
        facts = config.to_dict() if hasattr(config, "to_dict") else {}
        facts = {name: value for name, value in facts.items() if "name_or_path" not in name}
        digest.update(json.dumps(facts, sort_keys=True, default=lambda value: type(value).__name__).encode())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        flat = tensor.detach().reshape(-1)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for start in range(0, flat.numel(), _PIECE):
            part = flat[start : start + _PIECE].to("cpu").contiguous()
            digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _number(of: Sample | SampleScore) -> tuple[str, int, int]:
    return of.task, of.length_tokens, of.index
