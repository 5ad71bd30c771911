"""replay: the rows it adds, in every format, and that it keeps away from the probe."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from datasets import Dataset

from routeguard import RecallProbe, RouteGuard, measure_recall, replay
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import builtin_prose
from routeguard.recall.key_words import draw_number
from routeguard.recall.registry import TASKS, find_task
from routeguard.recall.replay import REPLAY_TASKS
from routeguard.recall.sample import build_sample
from routeguard.recall.task import Material
from tests.loops import tiny
from tests.recall_tokenizers import byte_bpe, characters
from tests.trainers import sft_arguments
from tests.zoo.build import build
from tests.zoo.case import text

NEEDLE = re.compile(r"magic numbers for (\S+) is: (\d+)\.")


def own(rows: int, style: str) -> Dataset:
    texts = [f"row {i}" for i in range(rows)]
    user = [[{"role": "user", "content": text}] for text in texts]
    answer = [[{"role": "assistant", "content": "yes"}] for _ in texts]
    if style == "text":
        return Dataset.from_dict({"prompt": texts, "completion": ["yes"] * rows, "source": texts})
    if style == "prompt messages":
        return Dataset.from_dict({"prompt": user, "completion": answer})
    return Dataset.from_dict({"messages": [a + b for a, b in zip(user, answer, strict=True)]})


def plain(rows: int) -> Dataset:
    return own(rows, "text").remove_columns("source")


def new_rows(mixed: Dataset) -> list[dict]:
    return [row for row in mixed if "special magic" in str(row)]


@pytest.mark.parametrize("style", ["text", "prompt messages", "messages"])
def test_messages_come_with_a_word_on_the_loss(style: str, capsys) -> None:
    replay(plain(40) if style == "text" else own(40, style), byte_bpe(chat=True), 0.05)
    assert ("only if the Trainer has assistant_only_loss=True" in capsys.readouterr().out) == (style == "messages")


def test_what_is_no_tokenizer_is_refused() -> None:
    for given in (None, "path/of/model"):
        with pytest.raises(ValueError, match=f"tokenizer={given!r} is no tokenizer; give the model's own"):
            replay(plain(90), given, 0.1)


def test_lengths_that_are_none_are_refused() -> None:
    for lengths, message in (
        ((), "give lengths of at least 1"),
        (512, "lengths=512: give a seq"),
        ((9.5,), "length 9.5"),
    ):
        with pytest.raises(ValueError, match=message):
            replay(plain(90), byte_bpe(), 0.1, lengths=lengths)


def test_text_rows_hide_and_answer(capsys) -> None:
    tokenizer = byte_bpe()
    call = {"lengths": (400, 500), "tasks": ["niah_single_2", "niah_multikey_1"], "fill": {"source": None}}
    mixed = replay(own(90, "text"), tokenizer, 0.1, **call)
    assert "10 of 100 rows ask niah_single_2, niah_multikey_1 at 400, 500 tokens" in capsys.readouterr().out
    assert len(mixed) == 100 and mixed.column_names == ["prompt", "completion", "source"]
    assert [row["source"] for row in mixed if row["source"]] == [f"row {i}" for i in range(90)]  # kept, in order
    added = new_rows(mixed)
    assert len(added) == 10 and all(row["source"] is None for row in added)
    places = [i for i, row in enumerate(mixed) if row["source"] is None]
    assert places != list(range(90, 100)) and len(places) == 10
    for row in added:
        asked = re.search(r"magic number for (\S+) mentioned in the provided text is$", row["prompt"])[1]
        assert row["completion"] == f" {dict(NEEDLE.findall(row['prompt']))[asked]}."
    lengths = {len(tokenizer(row["prompt"]).input_ids) // 100 for row in added}
    assert lengths <= {3, 4} and len(lengths) == 2
    again = replay(own(90, "text"), tokenizer, 0.1, **call)
    assert again.to_list() == mixed.to_list()


@pytest.mark.parametrize("style", ["messages", "prompt messages"])
def test_messages(style: str) -> None:
    mixed = replay(own(30, style), byte_bpe(chat=True), 0.1, lengths=(600,))
    added = new_rows(mixed)
    assert len(mixed) == 33 and len(added) == 3
    for row in added:
        *before, last = row["messages"] if style == "messages" else row["prompt"] + row["completion"]
        assert [turn["role"] for turn in before] == ["user"] and last["role"] == "assistant"
        values = dict(NEEDLE.findall(before[0]["content"])).values()
        assert any(value in last["content"] for value in values)
    with pytest.raises(ValueError, match="no chat template"):
        replay(own(30, style), byte_bpe(), 0.1)


def names(texts: list[str]) -> set[str]:
    return {key for text in texts for key, _ in NEEDLE.findall(text)}


def test_no_name_of_the_probe_is_ever_replayed() -> None:
    mixed = replay(plain(60), byte_bpe(), 0.3, lengths=(500,), tasks="niah_multikey_2")
    replayed = names([row["prompt"] for row in new_rows(mixed)])
    encoder = Encoder(byte_bpe())
    asked = names([
        build_sample(find_task("niah_multikey_2"), encoder, length_tokens=500, depth=None, index=i,
                     haystack=builtin_prose()).turns[0]
        for i in range(25)
    ])  # fmt: skip
    assert len(replayed) > 50 and len(asked) > 50
    nouns = [{name.split("-")[1] for name in group} for group in (replayed, asked)]
    assert not nouns[0] & nouns[1]


KINDS = {
    "variables": re.compile(r"VAR ([A-Z]+)\b"),
    "numbers": re.compile(r"\b(\d{5}|\d{7})\b"),
    "uuids": re.compile(r"\b([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"),
}


def hidden(task: str, split: str, drafts: int, words: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for seed in range(drafts):
        draft = find_task(task).draft(random.Random(seed), Material(builtin_prose(), split), None)
        whole = "\n".join((*draft.render(words).turns, draft.answer_prefix, *draft.answers))
        for kind, pattern in KINDS.items():
            found[kind] |= set(pattern.findall(whole))
    return found


@pytest.mark.parametrize(
    ("task", "kinds", "drafts", "words"),
    [  # so many that halves drawn from the same numbers would meet (expected: 200 times, 30 times)
        ("vt", ("variables", "numbers"), 600, 30),
        ("niah_multikey_2", ("numbers",), 120, 1800),
        ("niah_single_3", ("uuids",), 40, 30),
        ("niah_multikey_3", ("uuids",), 40, 300),
        ("niah_multiquery", ("numbers",), 100, 30),
    ],
)
def test_no_key_and_no_value_of_the_probe_is_replayed_whatever_the_seed(
    task: str, kinds: tuple[str, ...], drafts: int, words: int
) -> None:
    measured, replayed = (hidden(task, split, drafts, words) for split in ("measure", "replay"))
    for kind in kinds:
        assert len(measured[kind]) >= drafts and len(replayed[kind]) >= drafts
        assert not measured[kind] & replayed[kind]
        assert {sum(map(ord, each)) % 2 for each in measured[kind]} == {0}  # by construction, not by luck
        assert {sum(map(ord, each)) % 2 for each in replayed[kind]} == {1}


def test_each_half_has_every_letter_everywhere() -> None:
    rng = random.Random(0)
    for split in ("measure", "replay"):
        drawn = [draw_number(rng, 10_000, 99_998, split) for _ in range(500)]
        assert all({number[place] for number in drawn} >= set("123456789") for place in range(5))


@pytest.mark.parametrize("seed", range(4))
def test_replayed_rows_hide_their_own_half_only(seed: int) -> None:
    call = {"tasks": ["vt", "niah_multikey_3"], "lengths": (1800,), "seed": seed}
    text = " ".join(row["prompt"] + row["completion"] for row in new_rows(replay(plain(20), byte_bpe(), 0.2, **call)))
    text += " ".join(row["prompt"] for row in replay(plain(20), byte_bpe(), 0.2, **call) if "VAR" in row["prompt"])
    for kind in ("variables", "numbers", "uuids"):
        found = set(KINDS[kind].findall(text))
        assert len(found) > 3 and {sum(map(ord, each)) % 2 for each in found} == {1}


def test_tasks_of_the_probe_are_left_out() -> None:
    probe = RecallProbe(tasks=["niah_single_2", "niah_multikey_2"])
    mixed = replay(plain(40), byte_bpe(), 0.2, lengths=(700,), probe=probe)
    assert all(len(NEEDLE.findall(row["prompt"])) == 4 for row in new_rows(mixed))  # multikey_1 and multivalue only
    with pytest.raises(ValueError, match="the probe asks niah_single_2 too"):
        replay(plain(40), byte_bpe(), 0.2, tasks=["niah_single_2"], probe=probe)
    with pytest.raises(ValueError, match="the probe asks all of"):
        replay(plain(40), byte_bpe(), 0.2, probe=RecallProbe(tasks=REPLAY_TASKS))
    result = measure_recall(
        tiny("llama"), characters(), tasks="niah_single_1", lengths=(420,), num_samples=1, insist=True
    )
    with pytest.raises(ValueError, match="the probe asks niah_single_1 too"):
        replay(plain(40), characters(), 0.2, tasks=["niah_single_1"], probe=result)
    assert set(REPLAY_TASKS) < set(TASKS)


def test_a_probe_after_reasoning_asks_the_same() -> None:
    probe = RecallProbe(tasks=["niah_single_2+reasoning", "niah_multivalue"])
    mixed = replay(plain(20), byte_bpe(), 0.2, lengths=(700,), probe=probe)
    assert all("mentioned" in row["prompt"] and len(NEEDLE.findall(row["prompt"])) == 4 for row in new_rows(mixed))
    for task in ("niah_single_2", "niah_single_2+reasoning"):
        with pytest.raises(ValueError, match="the probe asks niah_single_2"):
            replay(plain(20), byte_bpe(), 0.2, tasks=[task], probe=probe)


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (["niah_single_2"], "RecallProbe or a RecallResult; got list"),
        ("niah_single_2", "got str"),
        ({"tasks": ["niah_single_2"]}, "got dict"),
        (RouteGuard("track", probe=RecallProbe()), r"got RouteGuard; give the guard's own probe, probe=guard\.probe"),
    ],
)
def test_what_is_no_probe_is_refused(probe, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(plain(20), byte_bpe(), 0.2, probe=probe)


def test_other_columns_are_filled_as_told_or_refused() -> None:
    data = own(20, "text").add_column("chat_template_kwargs", [{"enable_thinking": False}] * 20)
    with pytest.raises(ValueError, match=r"other columns: source, chat_template_kwargs; say what"):
        replay(data, byte_bpe(), 0.1, lengths=(500,))
    with pytest.raises(ValueError, match=r"other columns: chat_template_kwargs"):
        replay(data, byte_bpe(), 0.1, lengths=(500,), fill={"source": "replay"})
    with pytest.raises(ValueError, match=r"fill names sauce; the dataset's other columns are source"):
        replay(own(20, "text"), byte_bpe(), 0.1, fill={"source": None, "sauce": 1})
    with pytest.raises(ValueError, match="do not fit the dataset's columns"):
        replay(data, byte_bpe(), 0.1, lengths=(500,), fill={"source": "replay", "chat_template_kwargs": 3})
    told = {"source": "replay", "chat_template_kwargs": {"enable_thinking": True}}
    added = new_rows(replay(data, byte_bpe(), 0.1, lengths=(500,), fill=told))
    assert added and all({name: row[name] for name in told} == told for row in added)


def test_rows_of_the_default_lengths_survive_the_default_max_length(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    tokenizer, default = byte_bpe(), SFTConfig(str(tmp_path), use_cpu=True, bf16=False).max_length
    mixed = replay(plain(20), tokenizer, 0.2)
    args = sft_arguments(tmp_path, dataset_kwargs=None, max_length=default, max_steps=1)
    model = build(text("llama", vocab_size=len(tokenizer) + 10, max_position_embeddings=2048))
    trainer = SFTTrainer(model, args=args, processing_class=tokenizer, train_dataset=mixed)
    long = [row for row in trainer.train_dataset if len(row["input_ids"]) > 200]
    assert len(long) == len(new_rows(mixed)) == 5 and max(len(row["input_ids"]) for row in long) > 800
    chat = byte_bpe(chat=True)
    turns = [row["messages"] for row in new_rows(replay(own(20, "messages"), chat, 0.2))]
    sizes = [len(chat.apply_chat_template(each, tokenize=True, return_dict=False)) for each in turns]
    assert len(sizes) == 5 and 800 < max(sizes) <= default


def masked(row: dict[str, list[int]]) -> list[int]:
    """The labels that TRL's collator makes of a row; TRL before 1 keeps a mask until then."""
    return [token if kept else -100 for token, kept in zip(row["input_ids"], row["completion_mask"], strict=True)]


@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_on_the_answer(packing: bool, tmp_path: Path) -> None:
    """TRL's own preparation of the mixed rows: labels only where the answer stands, packed or not."""
    from trl import SFTTrainer

    tokenizer = characters()
    mixed = replay(plain(3), tokenizer, 0.4, lengths=(420,), tasks="niah_single_1")
    args = sft_arguments(
        tmp_path, dataset_kwargs=None, packing=packing, max_length=512, max_steps=1, padding_free=False
    )
    trainer = SFTTrainer(tiny("llama"), args=args, processing_class=tokenizer, train_dataset=mixed)
    answers = [row["completion"].strip() for row in new_rows(mixed)]
    learned = []
    for row in trainer.train_dataset:
        labels = row["labels"] if "labels" in row else masked(row)
        learned.append(tokenizer.decode([label for label in labels if label != -100]))
    assert len(answers) == 2 and all(any(answer in text for text in learned) for answer in answers)
    assert not any("magic" in text for text in learned)


@pytest.mark.parametrize(
    ("data", "share", "message"),
    [
        (plain(50), 0.0, "share=0.0"),
        (plain(50), 1.0, "share=1.0"),
        (plain(10), 0.01, "less than one row"),
        (plain(50).remove_columns("completion"), 0.1, "needs columns prompt and completion, or messages"),
        ({"train": []}, 0.1, "got dict"),
        (plain(50).select([]), 0.1, "no rows"),
    ],
)
def test_refusals(data, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(data, byte_bpe(), share)
