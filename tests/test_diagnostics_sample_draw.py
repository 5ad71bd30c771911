"""Of a large dataset only what is needed is read and tokenised."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from routeguard.cli.main import app
from routeguard.demo.model import WEIGHTS, load_tokenizer
from routeguard.diagnostics import autocorrelation
from routeguard.diagnostics.sample_draw import DataRead, draw_tokens
from routeguard.diagnostics.sample_files import read_samples, text_head

ROW = "let k07 4 2 river ask k07 4 2"


class Counting:
    """The demo's tokenizer, with a count of its calls."""

    def __init__(self) -> None:
        self.inner = load_tokenizer()
        self.calls: list[str] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.calls.append(text)
        return self.inner(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def jsonl(path: Path, num_rows: int, **fields: Any) -> Path:
    path.write_text("".join(json.dumps({"text": ROW, "number": n, **fields}) + "\n" for n in range(num_rows)))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_rows_are_tokenised_until_there_are_enough(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    path = tmp_path / f"data.{kind}"
    rows = [{"text": ROW, "number": number} for number in range(500)]
    if kind == "jsonl":
        jsonl(path, 500)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    tokenizer = Counting()
    per_row = len(tokenizer.inner(ROW)["input_ids"])
    drawn = draw_tokens(path, tokenizer, max_tokens=10 * per_row)
    assert len(tokenizer.calls) == len(drawn.documents) == 10
    assert drawn.read == DataRead(10, 500) and str(drawn.read).startswith("read 10 of 500 rows")


def test_the_draw_is_seeded_over_the_whole_file_and_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": [n, n]}) for n in range(1000)))
    firsts = [[row[0] for row in draw_tokens(path, None, max_tokens=40, seed=s).documents] for s in (0, 0, 1)]
    assert firsts[0] == firsts[1] == sorted(firsts[0]) != firsts[2]
    assert len(firsts[0]) == 20 and max(firsts[0]) > 500
    everything = draw_tokens(path, None, max_tokens=10**6)
    assert [row[0] for row in everything.documents] == list(range(1000))
    assert str(everything.read) == "read all 1000 rows of the data"


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "large.jsonl", 4000, filler="x" * 5000)
    tokenizer = load_tokenizer()
    draw_tokens(path, tokenizer, max_tokens=100)
    tracemalloc.start()
    draw_tokens(path, tokenizer, max_tokens=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 20_000_000 and peak < 1_000_000


def test_a_prompt_is_tokenised_once(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": ROW + " ", "completion": "4 2"})] * 7))
    tokenizer = Counting()
    drawn = draw_tokens(path, tokenizer, max_tokens=10**6, with_labels=True)
    assert len(tokenizer.calls) == 7
    assert drawn.labels is not None and all(row[-2:] != [-100, -100] and row[0] == -100 for row in drawn.labels)


def test_of_a_text_only_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(ROW + " river" * 100_000)
    tokenizer = Counting()
    drawn = draw_tokens(path, tokenizer, max_tokens=100)
    assert len(tokenizer.calls[0]) == 400
    assert str(drawn.read) == f"read the first 400 of {path.stat().st_size} bytes of the data"
    path.write_text("añb", encoding="utf-8")
    assert [text_head(path, size) for size in (1, 2, 3, 9)] == ["a", "a", "añ", "añb"]


def test_a_bad_row_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n \n{broken\n[1]\n{"text": "\xe9"}\n')
    rows = read_samples(path)
    assert len(rows) == 4 and rows[0] == {"text": "a"} and rows[:1] == [rows[0]]
    for number, message in ((1, "is not JSONL: .* in sample 1 from 0"), (2, "no list of samples"), (3, "not UTF-8")):
        with pytest.raises(ValueError, match=message):
            rows[number]
    path.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no list of samples"):
        read_samples(path)


def test_the_command_says_how_much_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocorrelation, "MAX_TOKENS", 200)
    path = jsonl(tmp_path / "rows.jsonl", 300)
    arguments = ["locality", str(path), "--tokenizer", str(WEIGHTS), "--max-lag", "4", "--lengths", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert " of 300 rows of the data, drawn at random" in result.output
    parsed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert parsed["read"]["used"] < 50 and parsed["read"]["given"] == 300 and parsed["read"]["unit"] == "rows"
