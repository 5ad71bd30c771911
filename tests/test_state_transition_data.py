"""Steps in traces: where they are cut, which words turn, patterns, step tokens, whole datasets."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForCausalLM

from routeguard.state_transition.convert import add_state_transition
from routeguard.state_transition.data import mark_steps
from routeguard.state_transition.entropy import transition_words
from routeguard.state_transition.layout import STEP, step_layout
from routeguard.state_transition.patterns import Patterns, cluster_patterns, embed_steps
from routeguard.state_transition.segment import normal, segment_steps, sentences
from routeguard.state_transition.step_marks import add_step_tokens
from tests.recall_tokenizers import byte_bpe

TRACE = (
    "We need the sum of the first two numbers here. It is seven plus five, so twelve in total. Wait, the task says "
    'product. "Alternatively" we may read it again with care and patience.\nSo the product is thirty five, as seven '
    "times five gives.  Check: 35 / 7 = 5. Wait. It holds, and the rest of it does as well."
)


def fresh_tokenizer() -> Any:
    return copy.deepcopy(byte_bpe())  # the other one is shared, and step tokens would stay in it


def first_tokens(encoded: Any, text: str, words: tuple[str, ...]) -> list[int]:
    """Which tokens begin those words."""
    offsets = enumerate(encoded["offset_mapping"])
    return [i for i, (a, b) in offsets if text[a:].lstrip().startswith(words) and text[a:b].strip()]


def tiny_llama(tokenizer: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **size)).eval()


def test_sentences_are_the_whole_text() -> None:
    found = sentences(TRACE)
    assert "".join(TRACE[s.start : s.stop] for s in found) == TRACE
    assert [s.first_word for s in found] == ["we", "it", "wait", "alternatively", "so", "check", "wait", "it"]
    assert sentences("  \n ") == [] and [s.start for s in sentences("  One. Two")] == [0, 7]
    listed = sentences("It is 5.\n1. Wait, no.\n- So it is. 7 of 9 are. Then 3.")
    assert [s.first_word for s in listed] == ["it", "wait", "so", "of", "then"]
    assert [normal(w) for w in ('"Wait,"', "2.", "don't", "**So**")] == ["wait", "", "don't", "so"]


def test_steps_begin_at_transition_words() -> None:
    steps = segment_steps(TRACE, words=["Wait", "alternatively", "SO"], min_words=5)
    assert "".join(steps) == TRACE
    assert [step.split()[0] for step in steps] == ["We", "Wait,", '"Alternatively"', "So", "Wait."]
    # Short steps take in the next sentence; long ones are cut at a sentence, and a long sentence stays whole.
    assert [len(s.split()) for s in segment_steps(TRACE, words=["wait"], min_words=60)] == [len(TRACE.split())]
    cut = segment_steps(TRACE, words=["wait"], min_words=1, max_words=12)
    assert "".join(cut) == TRACE and len(cut) > 4
    assert all(len(s.split()) <= 12 or len(sentences(s)) == 1 for s in cut)


CHINESE = (
    "我们需要求出前两个数的和。七加五等于十二。等等，题目说的是“乘积”！所以应该是七乘五，等于3.5乘10，也就是三十五。"
    "\n2、接下来检查一下：35除以7等于5？没错。“等一下。”他说。其实可以直接得出答案"
)


def test_sentences_of_scripts_without_blanks() -> None:
    found = sentences(CHINESE)
    assert "".join(CHINESE[s.start : s.stop] for s in found) == CHINESE
    assert [CHINESE[s.word_start : s.word_start + 2] for s in found] == [
        *("我们", "七加", "等等", "所以", "接下", "没错", "“等", "他说", "其实"),
    ]
    assert [s.start for s in found][4] == CHINESE.index("2、")  # the number belongs to its sentence
    assert found[0].num_words == 12 and [s.num_words for s in sentences("One two. 三四五。")] == [2, 3]
    mixed = sentences("令x=3.5，见https://a.b/c.d?e。因此OK. So it is！はい。そうです")
    assert [s.first_word for s in mixed] == ["令", "因", "so", "は", "そ"]


def test_chinese_steps_begin_at_transition_words() -> None:
    steps = segment_steps(CHINESE, min_words=5)
    assert "".join(steps) == CHINESE
    assert [step.lstrip()[:3] for step in steps] == ["我们需", "等等，", "所以应", "2、接", "“等一", "其实可"]
    assert len(segment_steps(CHINESE, words=["wait"], min_words=5, max_words=500)) == 1  # control
    cut = segment_steps(CHINESE, words=["wait"], min_words=1, max_words=20)
    assert "".join(cut) == CHINESE and len(cut) > 3
    found = segment_steps("先看第一步再说话。等于七的数有很多个。等等再看看。", words=["等等"], min_words=1)
    assert found == ["先看第一步再说话。等于七的数有很多个。", "等等再看看。"]


def test_chinese_transition_words_are_the_tokenizers() -> None:
    tokenizer = fresh_tokenizer()
    tokenizer.add_tokens(["所以", "等等"])
    model = tiny_llama(tokenizer)
    text = "七加五是十二。所以对了。等等，不对。所以再看。1. 等等。"
    found = transition_words(model, tokenizer, [text], min_count=2, share=1.0)
    assert {w.word: w.count for w in found.chosen} == {"所以": 2, "等等": 2}
    assert len(segment_steps(text, words=found.words, min_words=1)) == 5


@pytest.mark.parametrize(
    ("trace", "options", "message"),
    [
        (" \n", {}, "no words"),
        (TRACE, {"words": ["..."]}, "no transition words"),
        (TRACE, {"min_words": 0}, "min_words must be at least 1"),
        (TRACE, {"min_words": 9, "max_words": 8}, "max_words no less"),
    ],
)
def test_traces_that_cannot_be_cut(trace: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_steps(trace, **options)


def test_words_of_high_entropy_are_found() -> None:
    """A stand-in that is unsure before "Wait" and "Maybe" only, by the token that stands before them."""
    tokenizer = fresh_tokenizer()
    model = tiny_llama(tokenizer)
    plain = "The sum is seven. The product is six. "
    traces = [f"{plain}It is so. Wait that is wrong. {plain}Hm! Maybe it is six. {plain}" for _ in range(4)]
    ids = tokenizer(traces[0], return_offsets_mapping=True)
    turning = first_tokens(ids, traces[0], ("Wait", "Maybe"))
    own = model.forward

    def unsure(input_ids=None, **options):
        output = own(input_ids=input_ids, **options)
        sure = torch.full_like(output.logits, -20.0)
        sure[..., 0] = 20.0
        sure[:, [i - 1 for i in turning]] = 0.0
        output.logits = sure
        return output

    model.forward = unsure
    found = transition_words(model, tokenizer, traces, min_count=4, share=0.34)
    assert set(found.words) == {"wait", "maybe"} and all(w.count == 4 for w in found.chosen)
    assert all(w.entropy == pytest.approx(np.log(len(tokenizer)), rel=1e-3) for w in found.chosen)
    assert all(w.entropy < 1e-3 for w in found.others) and found.num_traces == 4
    assert "2 transition words of" in str(found) and "wait" in str(found)
    assert len(segment_steps(traces[0], words=found.words, min_words=1)) == 3
    with pytest.raises(ValueError, match="no word begins 40 sentences of 4 traces"):
        transition_words(model, tokenizer, traces, min_count=40)
    with pytest.raises(ValueError, match="share must be above 0"):
        transition_words(model, tokenizer, traces, share=0.0)


def test_entropies_are_those_of_the_model() -> None:
    tokenizer = fresh_tokenizer()
    model = tiny_llama(tokenizer)
    text = "One is here. Two is there. Two is here."
    found = transition_words(model, tokenizer, [text], min_count=1, share=1.0)
    encoded = tokenizer(text, return_offsets_mapping=True)
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([encoded.input_ids])).logits[0], -1)
    entropies = -(logs.exp() * logs).sum(-1)
    places = first_tokens(encoded, text, ("Two",))
    assert len(places) == 2
    wanted = float(sum(entropies[i - 1] for i in places)) / 2
    assert [w.word for w in found.chosen] == ["two"] and found.chosen[0].entropy == pytest.approx(wanted, rel=1e-4)


def test_patterns_are_clusters_by_direction() -> None:
    generator = np.random.default_rng(0)
    axes = np.eye(6, dtype=np.float32)[:3]
    kinds = generator.integers(0, 3, 90)
    lengths = generator.uniform(0.1, 30, (90, 1)).astype(np.float32)
    vectors = (axes[kinds] + 0.05 * generator.standard_normal((90, 6)).astype(np.float32)) * lengths
    patterns = cluster_patterns(vectors, num_patterns=3)
    groups = {tuple(sorted(set(patterns.labels[kinds == kind]))) for kind in range(3)}
    assert len(groups) == 3 and all(len(group) == 1 for group in groups)
    assert np.array_equal(patterns.of(vectors), patterns.labels)
    assert np.allclose(np.linalg.norm(patterns.centers, axis=1), 1, atol=1e-5)
    assert "3 thinking patterns over 90 steps" in str(patterns)
    with pytest.raises(ValueError, match=r"made from embeddings of width 6, these have the shape \(90, 5\)"):
        patterns.of(vectors[:, :5])
    with pytest.raises(ValueError, match="91 patterns were asked for and there are 90 steps"):
        cluster_patterns(vectors, num_patterns=91)


def test_step_embeddings_are_means_of_the_last_hidden_states() -> None:
    tokenizer = fresh_tokenizer()
    model = tiny_llama(tokenizer)
    steps = ["One and two.", "Wait."]
    found = embed_steps(model, tokenizer, steps)
    for step, vector in zip(steps, found, strict=True):
        with torch.no_grad():
            hidden = model.model(torch.tensor([tokenizer(step).input_ids])).last_hidden_state[0]
        assert np.allclose(vector, hidden.mean(0).numpy(), atol=1e-5)
    with pytest.raises(ValueError, match="has no tokens"):
        embed_steps(model, tokenizer, [""])


def test_step_tokens_are_tokens() -> None:
    tokenizer = fresh_tokenizer()
    before = len(tokenizer)
    marks = add_step_tokens(tokenizer, 3)
    assert marks.start_token_ids == (before, before + 1, before + 2) and marks.end_token_id == before + 3
    assert add_step_tokens(tokenizer, 3) == marks and len(tokenizer) == before + 4
    assert tokenizer(marks.wrap("x", 2)).input_ids[0] == before + 2
    assert marks.config(rank=3).token_ids == (*marks.start_token_ids, marks.end_token_id)
    with pytest.raises(ValueError, match="holds the step tokens"):
        marks.wrap("a<|step_end|>b")
    with pytest.raises(ValueError, match="pattern 3 has no start token; there are 3"):
        marks.wrap("a", 3)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        add_step_tokens(tokenizer, 0)

    class Cutting:
        def get_vocab(self):
            return {"<|step_0|>": 5, "<|step_end|>": 6}

        def convert_tokens_to_ids(self, mark):
            return self.get_vocab()[mark]

        def __call__(self, text, **options):
            return type("Encoded", (), {"input_ids": [1, 2, 3]})

    with pytest.raises(ValueError, match="not as a token of its own"):
        add_step_tokens(Cutting())


def rows() -> Dataset:
    answer = "</think>The answer is 35."
    return Dataset.from_dict(
        {"prompt": ["A?", "B?", "C?"], "completion": [TRACE + answer, TRACE[:80] + answer, TRACE], "id": [1, 2, 3]}
    )


@pytest.mark.parametrize("num_patterns", [1, 2])
def test_a_dataset_with_its_steps_marked(num_patterns: int, tmp_path: Path) -> None:
    tokenizer = fresh_tokenizer()
    model = tiny_llama(tokenizer)
    marks = add_step_tokens(tokenizer, num_patterns)
    marked = mark_steps(rows(), tokenizer, marks, model=model, words=["wait", "so"], min_words=4)
    data = marked.dataset
    assert data.column_names == ["prompt", "completion", "id"] and data["id"] == [1, 2, 3]
    for before, after in zip(rows()["completion"], data["completion"], strict=True):
        assert re.sub(r"<\|step_\w+\|>", "", after) == before
        assert after.startswith("<|step_") and after.count("<|step_end|>") == len(re.findall(r"<\|step_\d+\|>", after))
    assert data["completion"][0].endswith("</think><|step_end|>The answer is 35.")
    assert list(marked.trace_steps) == [4, 1, 4] and len(marked.step_tokens) == 9
    first = segment_steps(TRACE + "</think>", words=["wait", "so"], min_words=4)
    assert marked.step_tokens[0] == len(tokenizer(first[0], add_special_tokens=False).input_ids)
    layout = step_layout(
        torch.tensor([tokenizer(data["completion"][0]).input_ids]),
        start_token_ids=marks.start_token_ids,
        end_token_id=marks.end_token_id,
    )
    assert int(layout.step.max()) == 4 and int((layout.kind == STEP).sum()) == sum(marked.step_tokens[:4]) + 8
    assert "3 traces, 9 steps: 3.0 a trace (1 to 4)" in str(marked) and (marked.patterns is None) == (num_patterns == 1)
    marked.plot(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 5000
    add_state_transition(model, marks.config())  # the tokenizer's new ids follow the model's


def test_datasets_that_cannot_be_marked() -> None:
    tokenizer = fresh_tokenizer()
    marks = add_step_tokens(tokenizer)
    with pytest.raises(ValueError, match=r"no column 'text'; there are \['prompt', 'completion', 'id'\]"):
        mark_steps(rows(), tokenizer, marks, column="text")
    empty = Dataset.from_dict({"completion": [TRACE, "  "]})
    with pytest.raises(ValueError, match="row 1: the trace has no words"):
        mark_steps(empty, tokenizer, marks)
    with pytest.raises(ValueError, match=r"row 0 has a step of .* tokens, with its marks more than max_step_tokens=9"):
        mark_steps(rows(), tokenizer, marks, max_step_tokens=9)
    with pytest.raises(ValueError, match="has no rows"):
        mark_steps(Dataset.from_dict({"completion": []}), tokenizer, marks)
    with pytest.raises(
        ValueError, match=r"the tokenizer reads '<\|step_0\|>' as .* give it the step tokens by add_step"
    ):
        mark_steps(rows(), fresh_tokenizer(), marks)
    again = mark_steps(rows(), tokenizer, marks).dataset
    with pytest.raises(ValueError, match="holds the step tokens"):
        mark_steps(again, tokenizer, marks)
    several = add_step_tokens(tokenizer, 2)
    with pytest.raises(ValueError, match="2 start tokens need a model"):
        mark_steps(rows(), tokenizer, several)
    other = Patterns(np.eye(3, 32, dtype=np.float32), np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="3 patterns do not fit 2 start tokens"):
        mark_steps(rows(), tokenizer, several, model=tiny_llama(tokenizer), patterns=other)
    wide = Patterns(np.eye(2, 48, dtype=np.float32), np.zeros(0, dtype=np.int64))
    with pytest.raises(ValueError, match="embeddings of width 48"):
        mark_steps(rows(), tokenizer, several, model=tiny_llama(tokenizer), patterns=wide)


def test_marks_leave_the_tokens_of_the_text_alone() -> None:
    """Blanks open the next step, as the tokens of the plain text do."""
    tokenizer = fresh_tokenizer()
    plain = tokenizer(TRACE).input_ids
    marks = add_step_tokens(tokenizer)
    data = Dataset.from_dict({"completion": [TRACE]})
    marked = mark_steps(data, tokenizer, marks, words=["wait", "so", "check", "it"], min_words=1)
    ids = tokenizer(marked.dataset["completion"][0]).input_ids
    own = (*marks.start_token_ids, marks.end_token_id)
    assert marked.trace_steps[0] == 7 and [token for token in ids if token not in own] == plain


def test_rows_that_are_no_texts() -> None:
    tokenizer = fresh_tokenizer()
    marks = add_step_tokens(tokenizer)
    chat = Dataset.from_dict({"completion": [[{"role": "assistant", "content": "a"}]]})
    with pytest.raises(ValueError, match="row 0 holds a list where a text is expected; apply the chat template"):
        mark_steps(chat, tokenizer, marks)
    with pytest.raises(ValueError, match=r"DatasetDict; choose one of its splits \['train'\]"):
        mark_steps(DatasetDict({"train": rows()}), tokenizer, marks)
    asked = Dataset.from_dict({"prompt": ["<|step_0|>?"], "completion": [TRACE]})
    with pytest.raises(ValueError, match="row 0 holds the step tokens"):
        mark_steps(asked, tokenizer, marks)
