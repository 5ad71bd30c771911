"""Tokens of a dataset, of no more rows than are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routeguard.diagnostics.sample_files import is_text, read_samples, text_head
from routeguard.diagnostics.sample_layouts import sample_document
from routeguard.diagnostics.texts import refuse_many_unknown
from routeguard.routes.wording import as_printed

_BYTES_A_TOKEN = 4  # of a plain text; a text of longer tokens gives fewer than asked for


@dataclass(frozen=True)
class DataRead:
    """How much of a dataset was read: rows drawn at random, or the first bytes of a plain text."""

    used: int
    given: int
    unit: str = "rows"

    def __str__(self) -> str:
        if self.used == self.given:
            return f"read all {self.given} {self.unit} of the data"
        if self.unit == "bytes":
            return f"read the first {self.used} of {self.given} bytes of the data"
        return f"read {self.used} of {self.given} {self.unit} of the data, drawn at random"

    _repr_pretty_ = as_printed


@dataclass(frozen=True)
class DrawnTokens:
    """Token ids of the rows drawn, in the order of the file; their labels, or None where all tokens count."""

    documents: list[list[int]]
    labels: list[list[int]] | None
    read: DataRead


def draw_tokens(
    path: Path,
    tokenizer: Any,
    *,
    max_tokens: int,
    column: str | None = None,
    with_labels: bool = False,
    seed: int = 0,
) -> DrawnTokens:
    """Tokenise rows of a dataset, drawn at random, until there are enough tokens.

    Args:
        path: what `read_samples` reads. Of a plain text only the first four bytes a token are read.
        tokenizer: of Transformers.
        max_tokens: rows are drawn until there are this many tokens, or no row is left.
        column: which field of a sample, default: found out.
        with_labels: also say which tokens the loss counts.
        seed: of the draw.

    Raises:
        ValueError: a dataset that cannot be read, a layout not known, texts that the tokenizer does not know.
    """
    if is_text(path):
        size, most = path.stat().st_size, _BYTES_A_TOKEN * max_tokens
        samples: Any = [{"text": text_head(path, most)}]
        read = DataRead(min(size, most), size, "bytes")
    else:
        samples = read_samples(path)
        read = DataRead(len(samples), len(samples))
    drawn, total = {}, 0
    for number in np.random.default_rng(seed).permutation(len(samples)).tolist():
        drawn[number] = sample_document(tokenizer, samples[number], column=column, with_labels=with_labels)
        total += len(drawn[number].ids)
        if total >= max_tokens:
            break
    rows = [drawn[number] for number in sorted(drawn)]
    from_text = [token for row in rows if row.from_text for token in row.ids]
    refuse_many_unknown(tokenizer, from_text, "give data in its own language, or the tokenizer of its model")
    labels = [row.labels for row in rows] if any(row.labels != row.ids for row in rows) else None
    if read.unit == "rows":
        read = DataRead(len(rows), len(samples))
    return DrawnTokens([row.ids for row in rows], labels, read)
