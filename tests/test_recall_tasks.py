"""Recall tasks: RULER's text, exact lengths with any tokenizer, depths, seeds, and refusals."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sys
import types
from pathlib import Path

import pytest

from routeguard.demo.model import load_tokenizer
from routeguard.recall import templates
from routeguard.recall.boundaries import ends_sentence
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import builtin_prose
from routeguard.recall.key_words import ADJECTIVES, NOUNS, draw_words
from routeguard.recall.needles import NeedleTask
from routeguard.recall.registry import TASKS, find_task, find_tasks
from routeguard.recall.sample import build_sample
from routeguard.recall.task import Material, place
from tests.recall_tokenizers import byte_bpe, characters, sentencepiece_like

RULER = [name for name in TASKS if name != "demo_needles"]


def sample(task, tokenizer, length, *, chat=False, **options):
    settings = {"depth": 0.5, "index": 0, "haystack": builtin_prose(), **options}
    return build_sample(find_task(task), Encoder(tokenizer, chat=chat), length_tokens=length, **settings)


# -- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RULER, "niah_single_2+reasoning"])
@pytest.mark.parametrize("make", [byte_bpe, sentencepiece_like])
def test_prompts_have_exactly_the_length_asked_for(name: str, make) -> None:
    tokenizer = make()
    for index, length in enumerate((1500, 1777, 2048)):
        built = sample(name, tokenizer, length, index=index)
        assert len(built.prompt_ids) == length - built.reserve_tokens
        assert len(built.answer_ids) <= built.reserve_tokens
        text = "\n".join(built.turns) + " " + built.answer_prefix
        # The ids are what the tokenizer makes of the text, not pieces glued together.
        assert list(built.prompt_ids) == tokenizer(text).input_ids
        assert all(value in text for value in built.values)
        answer = tokenizer.decode(built.answer_ids)
        assert answer.strip() == built.answer.strip()
        for (start, stop), value in zip(built.spans, built.values, strict=True):
            assert tokenizer.decode(built.answer_ids[start:stop]).strip() == value


def test_other_tokenizers_and_chat_templates() -> None:
    single = sample("niah_single_1", characters(), 900)
    assert len(single.prompt_ids) == 900 - single.reserve_tokens and single.reserve_tokens == 10  # 1.25 * 8 characters
    ended = byte_bpe(ends=True)
    assert ended("text").input_ids[-1] == 2
    plain = sample("niah_single_2", ended, 1024)
    assert plain.prompt_ids[0] == 1 and plain.prompt_ids[-1] != 2  # <s> stays, </s> would end the text
    chatty = byte_bpe(chat=True)
    for task in ("niah_multikey_1", "niah_single_2+reasoning"):
        built = sample(task, chatty, 1600, chat=True)
        assert len(built.prompt_ids) == 1600 - built.reserve_tokens
        text = chatty.decode(built.prompt_ids)
        assert text.startswith("<|user|>") and text.endswith("<|assistant|>" + built.answer_prefix)
        assert text.count("<|assistant|>") == (2 if "reasoning" in task else 1)
    toy = sample("demo_needles", load_tokenizer(), 128)
    assert len(toy.prompt_ids) == 126 and len(toy.answer_ids) == 2


def test_room_for_the_answer_can_be_rulers_own() -> None:
    built = sample("niah_single_2", byte_bpe(), 2048, reserve_tokens=128)
    assert len(built.prompt_ids) == 2048 - 128


# -- depths and seeds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"])
def test_needles_stand_at_the_depth_asked_for(name: str) -> None:
    for depth in (0.0, 0.3, 1.0):
        built = sample(name, byte_bpe(), 1800, depth=depth)
        # a needle stands between sentences, and those of the manual are long
        assert built.depths[0] == pytest.approx(depth, abs=0.15)
        context = built.turns[0].split("\n", 1)[1].rsplit("\n", 1)[0]
        assert context.index(built.values[0]) / len(context) == pytest.approx(depth, abs=0.17)


def test_place_counts_depth_by_characters() -> None:
    text, depths = place(["aa", "bb", "cc", "dd"], [(1.0, "Y"), (0.0, "X"), (0.5, "Z")], " ")
    assert text == "X aa bb Z cc dd Y"
    assert depths == [1.0, 0.0, text.index("Z") / (len(text) - 1)]


def test_samples_depend_on_their_arguments_only() -> None:
    first, again = sample("niah_multikey_1", byte_bpe(), 1024), sample("niah_multikey_1", byte_bpe(), 1024)
    assert first == again and first.key == again.key
    others = [
        sample("niah_multikey_1", byte_bpe(), 1024, index=1),
        sample("niah_multikey_1", byte_bpe(), 1024, seed=1),
        sample("niah_multikey_1", byte_bpe(), 1025),
        sample("niah_multikey_1", byte_bpe(), 1024, split="replay"),
    ]
    assert len({first.key, *(other.key for other in others)}) == 5


def test_the_two_splits_share_no_name() -> None:
    rng = random.Random(0)
    nouns = {split: {draw_words(rng, split).split("-")[1] for _ in range(4000)} for split in ("measure", "replay")}
    assert nouns["measure"] | nouns["replay"] == set(NOUNS) and not nouns["measure"] & nouns["replay"]
    assert len(set(NOUNS)) == len(NOUNS) and len(set(ADJECTIVES)) == len(ADJECTIVES)


def test_what_each_task_hides_and_asks() -> None:
    def needles(name):
        built = sample(name, byte_bpe(), 1500)
        return re.findall(r"magic (?:numbers|uuids) for (\S+) is: (\S+)\.", built.turns[0]), built

    single, built = needles("niah_single_3")
    assert len(single) == 1 and single[0][1] == built.values[0] and len(built.values[0]) == 36
    four, built = needles("niah_multikey_1")
    assert len(four) == 4 and len({key for key, _ in four}) == 4 and len(built.values) == 1
    assert built.others == {value for _, value in four} - set(built.values)
    many, built = needles("niah_multikey_2")
    assert len(many) > 15 and built.others == {value for _, value in many} - set(built.values)
    assert [value for key, value in many if key in built.answer_prefix] == list(built.values)
    values, built = needles("niah_multivalue")
    assert len({key for key, _ in values}) == 1 and [value for _, value in values] == list(built.values)  # in order
    queried, built = needles("niah_multiquery")
    assert len(built.values) == 4 and dict(queried).keys() == set(re.findall(r"\w+-\w+", built.answer_prefix))
    chain = sample("vt", byte_bpe(), 2500)
    assert len(chain.values) == 5
    for before, name in zip(chain.values, chain.values[1:], strict=False):
        assert f"VAR {name} = VAR {before} " in chain.turns[0]
    assert list(chain.depths) == sorted(chain.depths)


def test_the_reasoning_stands_between_text_and_question_and_is_right() -> None:
    built = sample("niah_single_2+reasoning", byte_bpe(), 2500)
    text, chain, question = built.turns
    assert built.values[0] in text and question.startswith("What is the special magic number")
    sums = re.findall(r"(\d+) \+ (\d+) = (\d+)", chain)
    assert len(sums) == 12 and all(int(a) + int(b) == int(c) for a, b, c in sums)
    asked = re.search(r"one at a time: ([\d, ]+)\.", text)
    assert asked and sum(map(int, asked[1].split(","))) == int(sums[-1][2])


# -- RULER's own text ----------------------------------------------------------------------------------------------


def _ruler_folder() -> Path:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        pytest.skip("lm-eval is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "tasks" / "ruler"


def _constant(file: str, name: str):
    """A constant of a RULER module, read from its source: importing it would download data."""
    for node in ast.parse((_ruler_folder() / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no {name}")


def test_templates_are_rulers() -> None:
    template = _constant("niah_utils.py", "TEMPLATE")
    many = f"{templates.INTRO_MANY}\n{{context}}\n{templates.QUESTION_MANY}"
    assert many == template
    one = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
    assert f"{templates.INTRO_ONE}\n{{context}}\n{templates.QUESTION_ONE}" == one
    chain = _constant("vt_utils.py", "CONFIG")["variable_tracking"]
    assert f"{templates.CHAIN_INTRO}\n{{context}}\n{templates.CHAIN_QUESTION}" == chain["template"]
    assert chain["answer_prefix"].strip() == templates.CHAIN_PREFIX
    assert chain["tokens_to_generate"] == templates.CHAIN_TOKENS_TO_GENERATE
    source = (_ruler_folder() / "prepare_niah.py").read_text(encoding="utf-8")
    assert templates.NEEDLE in source and templates.NOISE in source
    assert "tokens_to_generate: int = 128" in source and templates.NEEDLE_TOKENS_TO_GENERATE == 128
    for prefix in (templates.PREFIX_ONE, templates.PREFIX_MANY):
        assert prefix.replace("{type_needle_v}", "") in re.sub(r"\{type_needle_v(\[:-1\])?\}", "", source)


def _in_sentences(words: list[str]) -> list[str]:
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if ends_sentence(word):
            sentences.append([])
    return [" ".join(sentence) for sentence in sentences if sentence]


def _ruler_niah(monkeypatch):
    """RULER's needle module with stand-ins for the packages that bring words and sentences."""
    _ruler_folder()
    words = types.ModuleType("wonderwords")
    words.RandomWord = lambda: types.SimpleNamespace(
        _categories={"nouns": list(NOUNS), "adjectives": list(ADJECTIVES), "verbs": []}
    )
    nltk = types.ModuleType("nltk")
    nltk.sent_tokenize = lambda text: _in_sentences(text.split(" "))
    nltk.data = types.SimpleNamespace(find=lambda name: name)
    for name, module in (("wonderwords", words), ("nltk", nltk)):
        monkeypatch.setitem(sys.modules, name, module)
    import importlib.metadata

    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9" if name == "nltk" else installed(name))
    pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    return importlib.import_module("lm_eval.tasks.ruler.prepare_niah")


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multivalue"])
def test_a_whole_prompt_is_rulers_byte_for_byte(name: str, monkeypatch) -> None:
    """RULER's generator draws; its names, values and places are read back and go through our renderer."""
    ruler = _ruler_niah(monkeypatch)
    task = find_task(name)
    assert isinstance(task, NeedleTask)
    haystack = templates.NOISE if task.filling == "noise" else list(builtin_prose().words)
    random.seed(5)
    size = 30 if task.filling == "noise" else 800
    text, answers, query = ruler.generate_input_output(
        size,
        haystack,
        type_haystack="repeat" if task.filling == "noise" else "essay",
        num_needle_k=task.num_keys,
        type_needle_k=task.keys,
        num_needle_v=task.num_values,
        type_needle_v=task.values,
        template=_constant("niah_utils.py", "TEMPLATE"),
        num_needle_q=task.num_queries,
    )
    context = text.split("\n", 1)[1].rsplit("\n", 1)[0]
    separator = "\n" if task.filling == "noise" else " "
    pattern = r"One of the special magic numbers for (\S+) is: (\d+)\."
    found = re.findall(pattern, context)
    pieces = context.split(separator) if task.filling == "noise" else _in_sentences(context.split(" "))
    num_pieces = len(pieces) - len(found)
    at = [i for i, piece in enumerate(pieces) if re.fullmatch(pattern, piece)]
    depths = [(place_ - i + 0.5) / num_pieces for i, place_ in enumerate(at)]

    draft = task.draft(random.Random(0), Material(builtin_prose()), None)
    order = [i for i, (key, _) in enumerate(found) if key in query]
    changes = {"hidden": tuple(found), "depths": tuple(depths), "asked": tuple(order), "queries": (query,), "start": 0}
    ours = types.SimpleNamespace(**{**vars(draft), **changes})
    ours = type(draft)(**vars(ours)).render(size * len(templates.NOISE.split()) if task.filling == "noise" else size)
    assert ours.turns[0] == text
    assert set(answers) == {found[i][1] for i in order}


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_length_too_short_for_the_needles_says_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"length 60 is too short for niah_multikey_1: .* ask for at least (\d+)") as e:
        sample("niah_multikey_1", byte_bpe(), 60)
    enough = int(re.search(r"at least (\d+)", str(e.value))[1])
    assert len(sample("niah_multikey_1", byte_bpe(), enough + 8).prompt_ids) > 60


def test_a_tokenizer_without_the_words_is_refused() -> None:
    with pytest.raises(ValueError, match="niah_single_2 needs words that this tokenizer does not know, such as 'A'"):
        sample("niah_single_2", load_tokenizer(), 512)
    with pytest.raises(ValueError, match="no chat template"):
        sample("niah_single_2", byte_bpe(), 512, chat=True)


def test_unknown_tasks() -> None:
    with pytest.raises(ValueError, match="no recall task 'niah_singl_2'; nearest 'niah_single_2'"):
        find_task("niah_singl_2")
    with pytest.raises(ValueError, match="each once"):
        find_tasks(["vt", "vt"])
    with pytest.raises(ValueError, match="each once"):
        find_tasks([])
    with pytest.raises(ValueError, match="no more queries than keys"):
        NeedleTask("mine", num_queries=2)
