"""Prompts with marks: the marked tokens are the needle and the question, and the last token predicts the value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from routeguard.cli.main import app
from routeguard.demo.model import WEIGHTS, load_model, load_tokenizer
from routeguard.diagnostics.needle_prompt import needle_prompt
from routeguard.diagnostics.routing_picture import attention_map, routing_picture
from tests import recall_tokenizers

TOKENIZERS = {
    "bytes": recall_tokenizers.byte_bpe,
    "ends": lambda: recall_tokenizers.byte_bpe(ends=True),
    "chat": lambda: recall_tokenizers.byte_bpe(chat=True),
    "sentencepiece": recall_tokenizers.sentencepiece_like,
    "characters": recall_tokenizers.characters,
}


class WithoutOffsets:
    """A tokenizer as Python ones are: it cannot say which characters a token stands for."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._inner(text, **options)


def marked(tokenizer: Any, prompt: Any, name: str) -> str:
    start, stop = prompt.marks[name]
    text: str = tokenizer.decode(prompt.input_ids[0, start:stop].tolist(), skip_special_tokens=True)
    return text.strip()


@pytest.mark.parametrize("kind", [*TOKENIZERS, "slow"])
@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_2", "niah_single_3+reasoning"])
def test_marks_hold_needle_and_question(kind: str, task: str) -> None:
    tokenizer = TOKENIZERS["bytes"]() if kind == "slow" else TOKENIZERS[kind]()
    given = WithoutOffsets(tokenizer) if kind == "slow" else tokenizer
    prompt = needle_prompt(given, task=task, length_tokens=6000, depth=0.3, seed=1, chat=kind == "chat")
    value = prompt.sample.values[0]
    needle, question = marked(tokenizer, prompt, "needle"), marked(tokenizer, prompt, "question")
    assert re.fullmatch(rf"One of the special magic (numbers|uuids) for [\w-]+ is: {value}\.?", needle)
    key = re.findall(r"for ([\w-]+) is", needle)[0]
    assert question.startswith(f"What is the special magic {'number' if 'uuid' not in needle else 'uuid'} for {key} ")
    assert question.endswith("mentioned in the provided text is")
    assert 0.25 < prompt.marks["needle"][0] / 6000 < 0.4
    assert prompt.marks["question"][1] == prompt.input_ids.shape[1]
    # What follows the prompt is the value itself, no blank.
    sample = prompt.sample
    rest = (*sample.prompt_ids, *sample.answer_ids)[prompt.input_ids.shape[1] :]
    assert (
        tokenizer.decode(list(rest)).strip().startswith(value[:1])
        and len(rest) == len(sample.answer_ids) - (sample.spans[0][0])
    )


def test_several_values_and_variables() -> None:
    tokenizer = recall_tokenizers.byte_bpe()
    prompt = needle_prompt(tokenizer, task="niah_multivalue", length_tokens=3000, depth=0.8)
    assert list(prompt.marks) == [*(f"needle {n}" for n in (1, 2, 3, 4)), "question"]
    for number, value in enumerate(prompt.sample.values, start=1):
        assert marked(tokenizer, prompt, f"needle {number}").rstrip(".").endswith(value)
    chain = needle_prompt(tokenizer, task="vt", length_tokens=3000, depth=0.1)
    for number, value in enumerate(chain.sample.values, start=1):
        assert value in marked(tokenizer, chain, f"needle {number}")


def test_values_that_stand_twice_in_the_demo() -> None:
    """Two digits are hidden six times: by chance some value is hidden twice."""
    tokenizer, twice = load_tokenizer(), 0
    for seed in range(60):
        for depth in (0.0, 0.4, 1.0):
            prompt = needle_prompt(tokenizer, task="demo_needles", length_tokens=128, depth=depth, seed=seed)
            name = marked(tokenizer, prompt, "question").removeprefix("ask ")
            value = prompt.sample.values[0]
            assert marked(tokenizer, prompt, "needle") == f"let {name} {value}", (seed, depth)
            twice += tokenizer.decode(prompt.input_ids[0].tolist()).count(f" {value}") > 1
    assert twice > 3


@pytest.mark.parametrize("sentence", ["天地玄黄宇宙洪荒。", "no sentence ends here "])
def test_a_haystack_of_any_language(sentence: str) -> None:
    tokenizer = recall_tokenizers.byte_bpe()
    prompt = needle_prompt(tokenizer, length_tokens=1500, depth=0.4, haystack=sentence * 400)
    assert re.fullmatch(rf"One of the special .* is: {prompt.sample.values[0]}\.?", marked(tokenizer, prompt, "needle"))


def test_errors() -> None:
    tokenizer = recall_tokenizers.byte_bpe()
    with pytest.raises(ValueError, match=r"depth 1\.5 is not between 0"):
        needle_prompt(tokenizer, depth=1.5)
    with pytest.raises(ValueError, match="nearest 'niah_single_2'"):
        needle_prompt(tokenizer, task="niah_singl_2")
    with pytest.raises(ValueError, match="too short for niah_single_2"):
        needle_prompt(tokenizer, length_tokens=20)


def test_command_line(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    model = load_model()
    model.model.layers[2].self_attn.k_proj.weight.data.mul_(-1.0)
    model.save_pretrained(tuned)
    load_tokenizer().save_pretrained(tuned)
    head = ["diagnose", "picture", str(tuned), "--layer", "2", "--head", "3"]
    asked = ["--task", "demo_needles", "--length", "256", "--depth", "0.3", "--seed", "4"]
    runner = CliRunner()
    options = ["--before", str(WEIGHTS), "--plot", str(tmp_path / "p.png")]
    result = runner.invoke(app, [*head, *asked, *options])
    assert result.exit_code == 0 and (tmp_path / "p.png").exists(), result.output
    prompt = needle_prompt(load_tokenizer(), task="demo_needles", length_tokens=256, depth=0.3, seed=4)
    states = {
        name: attention_map(which, prompt.input_ids, layer=2, head=3)
        for name, which in {"before": load_model(), "after": model}.items()
    }
    expected = routing_picture(states, marks=prompt.marks)
    before, after = (expected.received(state, "needle") for state in states)
    assert before > 1.2 * after > 0.01
    start, stop = prompt.marks["needle"]
    shares = f"before {before:.3f}, after {after:.3f}, restored {before:.3f}"
    assert f"attention of the last token to needle (tokens {start} to {stop - 1}): {shares}" in result.output
    parsed = json.loads(runner.invoke(app, [*head, *asked, "--json"]).stdout)
    assert parsed["received"]["needle"][""] == pytest.approx(after, rel=1e-4)
    for wrong, message in (
        (["--depth", "0.3"], "belong to --task, which is not given"),
        ([*asked, "--tokens", "64"], "give one or the other"),
        (["--task", "demo_needles", "--length", "1k,2k"], "give one length"),
        (["--task", "demo_needles", "--length", "x"], "--length 'x' is not"),
    ):
        result = runner.invoke(app, [*head, *wrong])
        assert result.exit_code == 2 and message in result.output
