"""Layouts of training samples: which text is read, and which of its tokens the loss counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routeguard.diagnostics.sample_layouts import sample_labels, sample_tokens
from routeguard.diagnostics.texts import read_samples, read_text
from tests.recall_tokenizers import byte_bpe

USER, ASSISTANT = {"role": "user", "content": "some words"}, {"role": "assistant", "content": "yes it is."}
CHAT = "<|user|>some words<|end|><|assistant|>yes it is.<|end|>"


def read(sample: dict[str, Any], **kinds: bool) -> str:
    tokenizer = byte_bpe(**kinds)
    return str(tokenizer.decode(sample_tokens(tokenizer, [sample])[0]))


def counted(sample: dict[str, Any], **kinds: bool) -> str | None:
    """The text that the loss counts; None where no labels are made."""
    tokenizer = byte_bpe(**kinds)
    documents = sample_tokens(tokenizer, [sample])
    labels = sample_labels(tokenizer, [sample], documents)
    if labels is None:
        return None
    assert [a for a, b in zip(labels[0], documents[0], strict=True) if a != b] == [-100] * labels[0].count(-100)
    return str(tokenizer.decode([label for label in labels[0] if label != -100]))


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


def test_samples_of_several_layouts_and_own_labels() -> None:
    tokenizer = byte_bpe()
    samples = [{"text": "one"}, {"prompt": "one", "completion": " two"}, {"input_ids": [5, 6], "labels": [-100, 6]}]
    documents = sample_tokens(tokenizer, samples)
    labels = sample_labels(tokenizer, samples, documents)
    assert labels is not None and labels[0] == documents[0] and labels[2] == [-100, 6]
    assert -100 in labels[1]


def test_files(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 ")
    for reads in (read_text, read_samples):
        with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
            reads(latin)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a\u2028b"}\n{"text": "c"}\n', encoding="utf-8")
    assert [row["text"] for row in read_samples(lines)] == ["a\u2028b", "c"]
