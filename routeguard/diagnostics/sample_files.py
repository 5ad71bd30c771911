"""Datasets of samples as files: JSONL, JSON, parquet, text or a saved folder, read row by row."""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from routeguard.diagnostics.texts import read_text


class JsonLines(Sequence[dict[str, Any]]):
    """Rows of a JSONL file, each parsed when it is asked for; only the places of the lines are held (8 bytes each).

    Raises ValueError for a file without a line, and on reading a line that is not an object in JSON and UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("q")
        start = 0
        with path.open("rb") as file:
            for line in file:
                if not line.isspace():
                    self._starts.append(start)
                start += len(line)
        if not self._starts:
            raise ValueError(_no_samples(path))

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        with self.path.open("rb") as file:
            file.seek(self._starts[number])
            line = file.readline()
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not UTF-8 text ({error.reason}); convert it") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path} is not JSONL: {error}, in sample {number} from 0") from None
        if not isinstance(row, dict):
            raise ValueError(_no_samples(self.path))
        return row


def read_samples(path: str | Path) -> Sequence[Mapping[str, Any]]:
    """Samples of a dataset: a JSONL, JSON or parquet file, a plain text file, or a folder of `datasets.save_to_disk`.

    Rows of JSONL, parquet and folders are read when they are asked for. A text file is one sample. Raises ValueError
    for what cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        from datasets import DatasetDict, load_from_disk

        try:
            loaded = load_from_disk(str(path))
        except Exception as error:
            raise ValueError(f"{path} is not a folder of datasets.save_to_disk: {error}") from None
        if isinstance(loaded, DatasetDict):
            loaded = loaded["train"] if "train" in loaded else loaded[next(iter(loaded))]
        rows: Sequence[Mapping[str, Any]] = loaded
        return rows
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a dataset folder")
    if path.suffix == ".parquet":
        from datasets import Dataset

        try:
            table: Sequence[Mapping[str, Any]] = Dataset.from_parquet(str(path))
        except Exception as error:
            raise ValueError(f"{path} is not a parquet file that can be read: {error}") from None
        return table
    if path.suffix == ".jsonl":
        return JsonLines(path)
    content = read_text(path)
    if path.suffix != ".json":
        return [{"text": content}]
    try:
        parsed = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, list) or not parsed or not all(isinstance(row, dict) for row in parsed):
        raise ValueError(_no_samples(path))
    return parsed


def is_text(path: Path) -> bool:
    """Whether `read_samples` takes a file as one plain text."""
    return path.is_file() and path.suffix not in (".jsonl", ".json", ".parquet")


def text_head(path: Path, num_bytes: int) -> str:
    """The first bytes of a text file, up to the last whole character; ValueError where they are not UTF-8."""
    with path.open("rb") as file:
        content = file.read(num_bytes)
    whole = len(content) < num_bytes
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None


def _no_samples(path: Path) -> str:
    return f"{path} holds no list of samples (objects with a text, messages or input_ids field)"
