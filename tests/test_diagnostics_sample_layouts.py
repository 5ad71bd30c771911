"""Layouts of training samples: which text is read, and which of its tokens the loss counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routeguard.diagnostics.sample_files import read_samples
from routeguard.diagnostics.sample_layouts import sample_document
from routeguard.diagnostics.texts import read_text
from tests.recall_tokenizers import byte_bpe

USER, ASSISTANT = {"role": "user", "content": "some words"}, {"role": "assistant", "content": "yes it is."}
CHAT = "<|user|>some words<|end|><|assistant|>yes it is.<|end|>"


def read(sample: dict[str, Any], **kinds: bool) -> str:
    tokenizer = byte_bpe(**kinds)
    return str(tokenizer.decode(sample_document(tokenizer, sample).ids))


def counted(sample: dict[str, Any], **kinds: bool) -> str | None:
    """The text that the loss counts; None where all counts."""
    tokenizer = byte_bpe(**kinds)
    document = sample_document(tokenizer, sample)
    ids, labels = document.ids, document.labels
    if labels == ids:
        return None
    assert [a for a, b in zip(labels, ids, strict=True) if a != b] == [-100] * labels.count(-100)
    return str(tokenizer.decode([label for label in labels if label != -100]))


def test_share_gpt_reads_as_messages_do() -> None:
    turns = [{"from": "human", "value": "some words"}, {"from": "gpt", "value": "yes it is."}]
    assert read({"messages": [USER, ASSISTANT]}, chat=True) == CHAT
    assert read({"conversations": turns}, chat=True) == CHAT
    assert read({"conversations": turns}) == "some words\nyes it is."
    assert counted({"conversations": turns}, chat=True) is None
    with pytest.raises(ValueError, match="fields speaker, line"):
        read({"conversations": [{"speaker": "a", "line": "b"}]})


@pytest.mark.parametrize(
    ("sample", "whole", "answer"),
    [
        ({"prompt": "one two", "completion": " three"}, "one two three", " three"),
        ({"prompt": "one two", "response": "three"}, "one two\nthree", "three"),
        ({"instruction": "one", "input": "two", "output": "three"}, "one\ntwo\nthree", "three"),
        ({"instruction": "one", "input": "", "output": "three", "id": 7}, "one\nthree", "three"),
        ({"instruction": "one", "output": "three", "text": "all of it"}, "all of it", None),
        ({"text": "all of it", "messages": None}, "all of it", None),
        ({"output": "three", "score": 1.0}, "three", None),
    ],
)
def test_prompt_with_its_answer(sample: dict[str, Any], whole: str, answer: str | None) -> None:
    assert read(sample) == whole
    assert counted(sample) == answer


@pytest.mark.parametrize(
    "sample",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a"},
        {"problem": "a", "output": "b"},
        {"instruction": "a", "output": "b", "response": "c"},
        {"story": "a"},
    ],
)
def test_other_layouts_are_refused_with_their_columns(sample: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"columns {', '.join(sample)};.*--column"):
        read(sample)


def test_a_chat_prompt_is_left_out_of_the_loss() -> None:
    sample = {"prompt": [USER], "completion": [ASSISTANT]}
    assert read(sample, chat=True) == CHAT
    assert counted(sample, chat=True) == "yes it is.<|end|>"
    assert counted({"prompt": [USER], "completion": ASSISTANT["content"]}, chat=True) == "yes it is.<|end|>"
    assert str(counted(sample)).strip() == "yes it is."


def test_the_end_mark_of_a_prompt_alone_takes_no_token_of_the_answer() -> None:
    tokenizer = byte_bpe(ends=True)
    sample = {"prompt": "one two", "completion": " three"}
    assert tokenizer("one two")["input_ids"][-1] == tokenizer.eos_token_id
    assert counted(sample, ends=True) == " three</s>"


def test_own_labels_come_first() -> None:
    sample = {"prompt": "one", "completion": " two", "input_ids": [5, 6], "labels": [-100, 6]}
    assert sample_document(byte_bpe(), sample).labels == [-100, 6]
    assert sample_document(byte_bpe(), sample, with_labels=False).labels == [5, 6]


def test_a_prompt_ends_at_the_same_token_in_fast_and_slow_tokenizers() -> None:
    fast = byte_bpe()

    class Slow:
        def __call__(self, text: str) -> Any:
            return fast(text)

    for prompt, answer in (("one two", " three"), ("one tw", "o three"), ("", "three"), ("añ", "ñb")):
        sample = {"prompt": prompt, "completion": answer}
        assert sample_document(fast, sample) == sample_document(Slow(), sample), prompt


def test_files(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 ")
    for reads in (read_text, read_samples):
        with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
            reads(latin)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert [row["text"] for row in read_samples(lines)] == ["a\u2028b", "c"]
