"""Haystacks of any script: what a user has, exact lengths, depths, and where needles stand without sentence ends."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from datasets import Dataset

from routeguard import RecallProbe, measure_recall, replay
from routeguard.cli.main import app
from routeguard.demo.model import WEIGHTS
from routeguard.recall.boundaries import ends_sentence, find_stops, split_words
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import Haystack, as_haystack, builtin_prose
from routeguard.recall.needles import NeedleTask
from routeguard.recall.registry import TASKS, find_task
from routeguard.recall.sample import build_sample
from routeguard.recall.task import Material, place, uses_haystack
from tests.recall_tokenizers import byte_bpe, characters
from tests.trainers import run
from tests.zoo.build import build

CHINESE = (
    "早上我去河边散步，水很清，鱼也很多。",
    "你吃过饭了吗？",
    "他说：“明天会下雨。”",
    "这本书用Python 3写成，共有120页！",
)
JAPANESE = (
    "昨日は図書館で本を三冊借りました。",
    "「もう帰ろう。」と彼は言った。",
    "コーヒーがとても熱い！",
    "駅まで歩いて何分ですか？",
)
THAI = ("วันนี้อากาศดีมาก", "แม่ไปตลาดซื้อปลา", "เราเดินกลับบ้านด้วยกัน")
NEEDLE = re.compile(r"One of the special magic numbers for \S+ is: \d+\.")


def many(sentences: tuple[str, ...], count: int = 900, between: str = "") -> str:
    return between.join(random.Random(0).choices(sentences, k=count))


TEXTS = {
    "chinese": many(CHINESE),
    "japanese": many(JAPANESE),
    "chinese without ends": re.sub(r"[^\w]", "", many(CHINESE)),
    "japanese lines": re.sub(r"[。！？「」]", "", many(JAPANESE, between="\n")),
    "thai": many(THAI, between=" "),
    "thai without blanks": many(THAI),
    "words without ends": " ".join(random.Random(1).choices(["alpha", "beta", "gamma", "delta"], k=4000)),
    "one long word": "abcdefghij" * 1500,
}


def sample(haystack, length: int, *, tokenizer=None, **options):
    settings = {"depth": 0.5, "index": 0, **options}
    encoder = Encoder(byte_bpe() if tokenizer is None else tokenizer)
    return build_sample(
        find_task("niah_single_2"), encoder, length_tokens=length, haystack=as_haystack(haystack), **settings
    )


def context_of(built) -> str:
    return built.turns[0].split("\n", 1)[1].rsplit("\n", 1)[0]


@pytest.mark.parametrize("name", TEXTS)
def test_exact_lengths_at_every_depth_in_every_script(name: str) -> None:
    trained = byte_bpe(2000, more=TEXTS["chinese"][:4000] + TEXTS["japanese"][:4000] + TEXTS["thai"][:4000])
    for tokenizer, length in ((byte_bpe(), 3000), (trained, 1201)):
        for index, depth in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
            built = sample(TEXTS[name], length, tokenizer=tokenizer, depth=depth, index=index)
            assert len(built.prompt_ids) == length - built.reserve_tokens
            context = context_of(built)
            assert built.depths[0] == pytest.approx(depth, abs=0.12)  # a collapsed grid has 0 for all but 1
            found = NEEDLE.search(context)
            assert found and found[0].endswith(f"{built.values[0]}.")
            assert found.start() / (len(context) - len(found[0])) == pytest.approx(built.depths[0], abs=0.02)


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_itself_is_not_changed(name: str) -> None:
    """Without its needle a context is a stretch of the text, blanks included; line breaks are blanks."""
    text = TEXTS[name].replace("\n", " ")
    for index in range(6):
        built = sample(TEXTS[name], 1500, depth=index / 5, index=index)
        before, after = NEEDLE.split(context_of(built))
        assert len(before) + len(after) > 400
        for stretch in (before, after):
            assert re.sub(r"( \.|\n| a| the)*$", "", stretch).strip()[:-1] in f"{text} {text}"  # less what fills it up


@pytest.mark.parametrize("name", ["chinese", "japanese"])
def test_needles_stand_after_sentences_of_any_script(name: str) -> None:
    for index in range(8):
        built = sample(TEXTS[name], 2000, depth=0.1 + 0.1 * index, index=index)
        before = NEEDLE.split(context_of(built))[0]
        assert re.search(r"[。！？]”?」?\s*$", before)
    assert not as_haystack(TEXTS[name]).notes


def test_where_they_stand_without_sentence_ends_is_said(capsys) -> None:
    expected = {
        "chinese without ends": "without a sentence end; needles stand between characters there",
        "thai without blanks": "needles stand between characters",
        "one long word": "needles stand between characters",
        "japanese lines": "needles stand after lines",
        "thai": "needles stand between words",
        "words without ends": "more than 120 words without a sentence end; needles stand between words",
    }
    for name, message in expected.items():
        notes = as_haystack(TEXTS[name]).notes
        assert len(notes) == 1 and message in notes[0] and notes[0].startswith(("100%", "99%", "98%"))
    result = measure_recall(
        build("llama"), characters(), tasks="niah_single_2", lengths=(600,), num_samples=1, insist=True,
        haystack=TEXTS["words without ends"],
    )  # fmt: skip
    assert "note: 100% of the haystack (the given text)" in str(result)
    rows = Dataset.from_dict({"prompt": ["a"] * 10, "completion": ["b"] * 10})
    replay(rows, byte_bpe(), 0.2, haystack=TEXTS["thai"], tasks="niah_single_2", lengths=(900,))
    assert "replay: note: 100% of the haystack (the given text)" in capsys.readouterr().out
    replay(rows, byte_bpe(), 0.2, tasks="niah_single_1", lengths=(900,))
    assert "note:" not in capsys.readouterr().out  # no prose in that task
    built = sample(TEXTS["thai"], 2000)
    assert NEEDLE.split(context_of(built))[0].rstrip(" ").endswith(THAI)  # at a blank, not within a word
    built = sample(TEXTS["japanese lines"], 2000, depth=0.4)
    lines = tuple(TEXTS["japanese lines"].split("\n"))
    assert NEEDLE.split(context_of(built))[0].rstrip(" ").endswith(lines)


UNUSED = ("demo_needles", "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "vt+reasoning")


def test_tasks_know_whether_they_use_the_haystack() -> None:
    """By what they write: another text gives another context, or the same."""
    for name in TASKS:
        written = set()
        for own in ("Alpha beta gamma. " * 400, "Delta epsilon zeta. " * 400):
            draft = find_task(name).draft(random.Random(3), Material(as_haystack(own)), 0.5)
            written.add(draft.render(90).turns)
        assert (len(written) == 2) == uses_haystack(find_task(name)) == (name not in UNUSED), name
    assert not uses_haystack(find_task("vt+reasoning")) and uses_haystack(find_task("niah_single_2+reasoning"))


@pytest.mark.parametrize("tasks", [[name] for name in UNUSED] + [["vt", "niah_multikey_2"]])
def test_a_haystack_that_no_task_uses_is_refused(tasks: list[str], tmp_path: Path) -> None:
    message = rf"a haystack was given, and {re.escape(', '.join(tasks))} would not use it: .* ask niah_single_2, niah_s"
    with pytest.raises(ValueError, match=message):
        measure_recall(build("llama"), characters(), tasks=tasks, lengths=(600,), haystack=TEXTS["thai"])
    with pytest.raises(ValueError, match=message):
        RecallProbe(tasks=tasks, haystack=TEXTS["thai"])
    with pytest.raises(ValueError, match=message):
        replay(Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}), byte_bpe(), 0.5, tasks=tasks,
               haystack=TEXTS["thai"])  # fmt: skip
    (tmp_path / "own.txt").write_text("A text of mine. " * 400)
    called = CliRunner().invoke(
        app, ["recall", str(WEIGHTS), "--tasks", ",".join(tasks), "--haystack", str(tmp_path / "own.txt")]
    )
    assert called.exit_code == 2 and re.search(message, called.stderr)


def test_a_haystack_that_some_tasks_use_comes_with_a_note(tmp_path: Path, capsys) -> None:
    own, both = "A text of mine. It is long. " * 600, ["niah_single_2", "niah_multikey_2"]
    settings = {"lengths": (600,), "num_samples": 1, "insist": True}
    model, note = build("llama"), "the haystack (the given text) is not used by niah_multikey_2"
    result = measure_recall(model, characters(), tasks=both, haystack=own, **settings)
    assert f"note: {note}" in str(result) and result.settings["haystack"] == "the given text"
    built_in = measure_recall(model, characters(), tasks=both, **settings)
    assert not built_in.notes and built_in.settings["haystack"] == "prose of Python's manual"
    assert measure_recall(model, characters(), tasks="niah_multikey_2", **settings).settings["haystack"] is None
    rows = Dataset.from_dict({"prompt": ["a"] * 10, "completion": ["b"] * 10})
    replay(rows, byte_bpe(), 0.2, haystack=own, tasks=both, lengths=(900,))
    assert f"routeguard: replay: note: {note}" in capsys.readouterr().out
    probe = RecallProbe(tasks=both, haystack=own, tokenizer=characters(), **settings)
    run(model, tmp_path, probe, max_steps=1)
    assert f"note: {note}" in capsys.readouterr().out and note in probe.results[1].notes[0]


def test_hard_wrapped_prose_is_not_cut_at_its_lines() -> None:
    wrapped = as_haystack("The cat sat on\nthe mat. Then it\nwent away.\n\nA title\n\nMore of it here.")
    pieces, glued = wrapped.pieces(len(wrapped.words), 0)
    assert pieces == ["The cat sat on the mat.", "Then it went away.", "A title", "More of it here."] and not glued


def test_words_and_characters() -> None:
    words, marks = split_words("他说：“明天下雨。”Python 3很好。 ok")
    assert words == ["他", "说：", "“明", "天", "下", "雨。”", "Python", "3", "很", "好。", "ok"]
    assert [mark & 1 for mark in marks] == [1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]
    assert [word for word in words if ends_sentence(word)] == ["雨。”", "好。"]
    assert split_words("“Quoted” Straße")[0] == ["“Quoted”", "Straße"]
    assert split_words("กี่")[0] == ["กี่"]  # vowels and tones stay on their consonant
    assert len(split_words("x" * 61)[0]) == 61 and len(split_words("x" * 60)[0]) == 1
    for word in ("end.", "end!)", "konec?»", "अंत।", "نهاية؟", "终。』", "մի։"):
        assert ends_sentence(word)
    assert not any(map(ends_sentence, ("3.5", "a,", "word", "词，")))


def test_long_sentences_are_cut_at_commas_first() -> None:
    words, marks = split_words(" ".join(f"w{i}{',' if i % 30 == 29 else ''}" for i in range(150)))
    stops = find_stops(words, bytes(marks))
    cut = [i for i in range(150) if stops.after[i]]
    assert 29 in cut and cut[-1] == 149 and max(b - a for a, b in itertools.pairwise(cut)) <= 48
    assert stops.words > 100 and not stops.characters and not stops.lines
    short = split_words(" ".join(f"w{i}" for i in range(119)))
    assert find_stops(short[0], bytes(short[1])).after.count(1) == 1  # a sentence that is not too long stays whole


def test_place_glues_what_was_glued() -> None:
    text, depths = place(["甲。", "乙。", "bb.", "丙。"], [(0.5, "X")], " ", {0, 1})
    assert text == "甲。乙。 X bb. 丙。" and depths == [text.index("X") / (len(text) - 1)]
    assert place(["甲。", "乙。"], [], " ", {0, 1})[0] == "甲。乙。"


def test_a_guess_beyond_the_haystack_is_no_refusal() -> None:
    """Long words of many tokens: fewer of them are needed than the first guess says."""
    text = " ".join(f"Zyxwvq{i}Qqjkxz." for i in range(330))
    tokens = len(byte_bpe()(text).input_ids)
    length = 3000
    assert tokens > length + 200 and length / 1.3 > 330
    built = sample(text, length)
    assert len(built.prompt_ids) == length - built.reserve_tokens
    with pytest.raises(ValueError, match=r"has 330 words, and (\d+) are needed") as caught:
        sample(text, tokens + 400)
    assert 330 < int(re.search(r"and (\d+) are", str(caught.value))[1]) < 500


def test_a_short_chinese_text_counts_its_characters() -> None:
    with pytest.raises(ValueError, match=r"has \d+ characters, and [\d,]+ are needed"):
        sample("".join(CHINESE), 2000)
    task = NeedleTask("mine")
    draft = task.draft(random.Random(0), Material(as_haystack(TEXTS["chinese"])), 0.5)
    assert "。" in draft.render(60).turns[0]
    with pytest.raises(ValueError, match="as many marks"):
        Haystack(("a", "b"), "mine", marks=b"\0")


def test_a_short_haystack_is_refused_not_repeated() -> None:
    short = as_haystack("A text of my own. It is not long. " * 20)
    assert len(short.words) == 180
    with pytest.raises(ValueError, match=r"180 words, and .* are needed"):
        sample(short, 2000)
    again = sample(Haystack(short.words, "mine", repeats=True), 2000)
    assert len(again.prompt_ids) == 2000 - again.reserve_tokens
    assert "A text of my own." in sample(short, 300).turns[0]


def test_haystacks_from_what_a_user_has() -> None:
    rows = Dataset.from_dict({"text": ["One two three.", "Four five."], "label": [0, 1]})
    assert as_haystack((rows, "text")).words == ("One", "two", "three.", "Four", "five.")
    assert as_haystack(["One two.", "Three."]).words == ("One", "two.", "Three.")
    assert len(builtin_prose().words) > 20_000
    with pytest.raises(ValueError, match="no column 'txt'; nearest: text"):
        as_haystack((rows, "txt"))
    with pytest.raises(ValueError, match="holds a int where a text is needed"):
        as_haystack((rows, "label"))
    with pytest.raises(ValueError, match="no words in it"):
        as_haystack("  ")
    with pytest.raises(ValueError, match="not a int"):
        as_haystack(3)
