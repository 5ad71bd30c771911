"""measure_recall: what it counts, resuming, refusals, the command, and the picture."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from routeguard import RecallResult, measure_recall
from routeguard.cli.main import app
from routeguard.cli.shared import parse_lengths
from routeguard.demo.model import WEIGHTS, build_model, load_model, load_tokenizer
from routeguard.recall import measure as measure_module
from routeguard.recall.journal import fingerprint
from routeguard.recall.needles import NeedleTask
from routeguard.recall.reasoning import AfterReasoning
from routeguard.recall.registry import find_task
from tests.recall_tokenizers import byte_bpe, characters
from tests.zoo.build import build
from tests.zoo.case import text as case_of

runner = CliRunner()


@pytest.fixture(scope="module")
def shipped() -> RecallResult:
    return measure_recall(load_model(), load_tokenizer(), tasks="demo_needles", lengths=(128, 1024), num_samples=10)


def test_the_shipped_hybrid_recalls_and_an_untrained_one_does_not(shipped: RecallResult) -> None:
    assert shipped.accuracy(length=128) == 1.0 and shipped.accuracy(length=1024) > 0.6
    untrained = measure_recall(build_model(), load_tokenizer(), tasks="demo_needles", lengths=(128,), num_samples=10)
    assert untrained.accuracy() < 0.3
    assert len(untrained.failures()) == sum(s.score < 1 for s in untrained.scores)
    assert "@128" in str(untrained) and "values missed" in str(untrained)
    with pytest.raises(ValueError, match="nothing measured for task vt"):
        shipped.accuracy(task="vt")


def test_cells_count_by_length_and_depth(shipped: RecallResult) -> None:
    short, long = shipped.cells()
    assert short.label == ("demo_needles", 128) and long.label == ("demo_needles", 1024)
    assert short.count == 10 and short.low == pytest.approx(0.722, abs=1e-3) and short.high == 1.0
    assert short.nll < long.nll
    depths = shipped.by_depth(5)
    assert sum(count for _, count in depths.values()) == 20
    assert all(depths[128, part] == (1.0, 2) for part in range(5))
    total = sum(share * count for share, count in depths.values())
    assert total == pytest.approx(sum(s.score for s in shipped.scores))


def test_results_round_trip(shipped: RecallResult, tmp_path: Path) -> None:
    shipped.save(tmp_path / "deep" / "recall.json")
    assert RecallResult.load(tmp_path / "deep") == shipped
    data = json.loads((tmp_path / "deep" / "recall.json").read_text())
    assert data["schema_version"] == 1 and data["cells"][0]["length_tokens"] == 128
    for change, message in (({"schema_version": 9}, "version 9"), ({"kind": "x"}, "not a recall result")):
        (tmp_path / "bad.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(ValueError, match=message):
            RecallResult.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="not a file"):
        RecallResult.load(tmp_path / "nowhere.json")


def test_the_model_and_random_states_are_left_alone() -> None:
    model = load_model().train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state().clone()
    measure_recall(model, load_tokenizer(), tasks="demo_needles", lengths=(96,), num_samples=2, method="generated")
    assert flags == [module.training for module in model.modules()]
    assert before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("case", ["qwen3_next", "granitemoehybrid", "nemotron_h", "gemma3_text", "lfm2"])
def test_any_architecture_can_be_measured(case: str) -> None:
    result = measure_recall(
        build(case), characters(), tasks="niah_single_1", lengths=(420,), num_samples=2, insist=True
    )
    assert len(result.scores) == 2 and result.accuracy() == 0.0
    assert 2 < result.cells()[0].nll < 20  # random weights know nothing: about log(96)


def test_generation_finds_values_too() -> None:
    result = measure_recall(
        load_model(), load_tokenizer(), tasks="demo_needles", lengths=(128,), num_samples=5, method="generated"
    )
    assert result.accuracy() == 1.0 and result.cells()[0].nll is None


def test_a_stopped_measurement_goes_on(tmp_path: Path, monkeypatch) -> None:
    model, tokenizer = load_model(), load_tokenizer()
    call = {"tasks": "demo_needles", "lengths": (128, 160), "num_samples": 6, "batch_tokens": 300}
    whole = measure_recall(model, tokenizer, **call)
    journal = tmp_path / "part.jsonl"
    batches = []
    original = measure_module.answer_forced

    def counting(model, tokenizer, samples, **options):
        batches.append(len(samples))
        if len(batches) == 4:
            raise KeyboardInterrupt
        return original(model, tokenizer, samples, **options)

    monkeypatch.setattr(measure_module, "answer_forced", counting)
    with pytest.raises(KeyboardInterrupt):
        measure_recall(model, tokenizer, **call, resume=journal)
    with journal.open("a") as stream:
        stream.write('{"key": "half a li')
    told = []
    again = measure_recall(model, tokenizer, **call, resume=journal, progress=lambda *args: told.append(args))
    assert sum(batches[:3]) == 6 and sum(batches[4:]) == 6  # nothing twice
    assert [s.score for s in again.scores] == [s.score for s in whole.scores]
    assert [s.key for s in again.scores] == [s.key for s in whole.scores]
    assert told[-1][:2] == (12, 12) and told[-1][2] == 0 and told[0][0] > 6
    batches.clear()
    measure_recall(model, tokenizer, **call, resume=journal)
    assert not batches
    with pytest.raises(ValueError, match=r"other settings \(another model, by its weights or conf"):
        measure_recall(build_model(seed=3), tokenizer, **call, resume=journal)
    with pytest.raises(ValueError, match=r"other settings \(seed was 0 and is 2\)"):
        measure_recall(model, tokenizer, **call, seed=2, resume=journal)


def test_a_call_without_a_score_is_not_in_the_way_of_another(tmp_path: Path, monkeypatch) -> None:
    model, tokenizer, journal = load_model(), load_tokenizer(), tmp_path / "part.jsonl"
    call = {"tasks": "demo_needles", "num_samples": 2, "resume": journal}
    with pytest.raises(ValueError, match="too short"):
        measure_recall(model, tokenizer, lengths=(8,), **call)
    assert not journal.exists()

    def stopped(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(measure_module, "answer_forced", stopped)
        measure_recall(model, tokenizer, lengths=(160,), **call)
    assert '"lengths": [160]' in journal.read_text()
    assert measure_recall(model, tokenizer, lengths=(128,), **call).lengths == (128,)
    assert '"lengths": [128]' in journal.read_text()


def test_scores_of_other_samples_are_not_taken_over(tmp_path: Path) -> None:
    """Another haystack of the same kind, another tokenizer, another task of the same name."""
    model, journal = build("llama"), tmp_path / "part.jsonl"
    call = {"lengths": (600,), "num_samples": 2, "insist": True, "resume": journal}
    first = {"tasks": [NeedleTask("mine")], "haystack": "alpha beta gamma delta. " * 900}
    begun = measure_recall(model, characters(), **call, **first)
    kept = journal.read_text()
    for change in (
        {"haystack": "one two three four five. " * 900},
        {"tasks": [NeedleTask("mine", values="uuids")]},
    ):
        with pytest.raises(ValueError, match=r"begun with other samples.*delete the file"):
            measure_recall(model, characters(), **call, **{**first, **change})
    assert journal.read_text() == kept
    longer = measure_recall(model, characters(), **{**call, "resume": tmp_path / "new.jsonl"}, **first)
    assert [s.key for s in longer.scores] == [s.key for s in begun.scores]
    other = byte_bpe()
    wide = build(case_of("llama", vocab_size=len(other) + 10))
    lines = [json.loads(line) for line in kept.splitlines()]
    lines[0]["settings"]["fingerprint"] = fingerprint(wide)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="begun with other samples"):
        measure_recall(wide, other, **call, **first)


def test_the_fingerprint_sees_each_weight_and_the_configuration() -> None:
    model = build("llama")
    first = fingerprint(model)
    assert fingerprint(build("llama")) == first
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight[1, 3] += 1
    assert fingerprint(model) != first
    with torch.no_grad():
        weight.copy_(build("llama").model.layers[0].self_attn.q_proj.weight)
    assert fingerprint(model) == first
    model.config.rope_parameters = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0}
    assert fingerprint(model) != first


@dataclass
class OwnTask:
    """A task of a user's own that cannot be hashed, as a dataclass with == cannot."""

    name: str
    hidden: list[str]
    joiner: str = ","

    def draft(self, rng, material, depth):
        return NeedleTask(self.name, num_keys=len(self.hidden)).draft(rng, material, depth)


def test_tasks_of_ones_own_need_not_be_hashable() -> None:
    own = [OwnTask("one", ["a"]), OwnTask("two", ["a", "b"])]
    with pytest.raises(TypeError, match="unhashable"):
        hash(own[0])
    result = measure_recall(build("llama"), characters(), tasks=own, lengths=(700,), num_samples=1, insist=True)
    assert result.tasks == ("one", "two")
    asked = measure_recall(
        build("llama"), characters(), tasks=[find_task("niah_single_2+reasoning"), AfterReasoning(own[1])],
        lengths=(2400,), num_samples=1, insist=True,
    )  # fmt: skip
    assert asked.tasks == ("niah_single_2+reasoning", "two+reasoning")


@dataclass
class OneLine(OwnTask):
    """Its question stands on the line of its text."""

    def draft(self, rng, material, depth):
        draft = super().draft(rng, material, depth)
        render = draft.render

        def one_line(num_words: int, extra: str = ""):
            rendered = render(num_words, extra)
            return replace(rendered, turns=(rendered.turns[0].replace("\n", " "),))

        object.__setattr__(draft, "render", one_line)
        return draft


def test_a_question_that_cannot_be_told_from_its_text_is_refused_after_reasoning() -> None:
    own = OneLine("mine", ["a"])
    settings = {"lengths": (2400,), "num_samples": 1, "insist": True}
    assert measure_recall(build("llama"), characters(), tasks=[own], **settings).tasks == ("mine",)
    with pytest.raises(ValueError, match=r"no 'mine\+reasoning': the last turn of mine has no line break"):
        measure_recall(build("llama"), characters(), tasks=[AfterReasoning(own)], **settings)


def test_several_values_teacher_forced_carry_a_note() -> None:
    result = measure_recall(
        build("llama"), characters(), tasks="niah_multivalue", lengths=(900,), num_samples=1, insist=True
    )
    assert "expected in one order (that of the text" in str(result)


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_measures_writes_and_prints(tmp_path: Path) -> None:
    arguments = ["recall", str(WEIGHTS), "--tasks", "demo_needles", "--lengths", "128,256", "--samples", "4"]
    result = runner.invoke(app, [*arguments, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "@128" in result.output and "8/8 samples, about 0 s left" in result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recall.json", "recall.png"]
    assert (tmp_path / "recall.png").read_bytes()[1:4] == b"PNG"
    as_json = runner.invoke(app, [*arguments, "--json"])
    assert RecallResult.from_dict(json.loads(as_json.stdout)).scores == RecallResult.load(tmp_path).scores


def test_an_earlier_result_is_moved_aside_not_written_over(tmp_path: Path) -> None:
    arguments = ["recall", str(WEIGHTS), "--tasks", "demo_needles", "--lengths", "64", "--output", str(tmp_path)]
    runner.invoke(app, [*arguments, "--samples", "1"])
    first = (tmp_path / "recall.json").read_bytes()
    same = runner.invoke(app, [*arguments, "--samples", "1"])
    assert "kept what was there" not in same.output and not (tmp_path / "recall.1.json").exists()
    other = runner.invoke(app, [*arguments, "--samples", "2"])
    assert f"kept what was there as {tmp_path / 'recall.1.json'}, {tmp_path / 'recall.1.png'}" in other.stderr
    assert (tmp_path / "recall.1.json").read_bytes() == first and len(RecallResult.load(tmp_path).scores) == 2
    (tmp_path / "recall.json").write_text("damaged")
    runner.invoke(app, [*arguments, "--samples", "2"])
    assert (tmp_path / "recall.2.json").read_text() == "damaged" and RecallResult.load(tmp_path)


def test_an_adapters_result_is_labelled_with_its_own_folder(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    load_model().save_pretrained(base)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(adapter)
    for folder in (base, adapter):
        load_tokenizer().save_pretrained(folder)
        arguments = ["recall", str(folder), "--tasks", "demo_needles", "--lengths", "64", "--samples", "1", "--json"]
        called = runner.invoke(app, [*arguments, "--output", str(tmp_path / "out")])
        assert called.exit_code == 0, called.output
        assert json.loads(called.stdout)["settings"]["model"] == str(folder)
        assert RecallResult.load(tmp_path / "out").settings["model"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([str(WEIGHTS), "--lengths", "4q"], "not a list of lengths"),
        ([str(WEIGHTS), "--tasks", "niah"], "no recall task 'niah'"),
        ([str(WEIGHTS), "--haystack", "nowhere.txt"], "nowhere.txt is not a file"),
        ([str(WEIGHTS), "--tasks", "demo_needles", "--lengths", "8k"], "beyond the 4096 positions"),
    ],
)
def test_bad_input_of_the_command(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["recall", *arguments])
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output


def test_parse_lengths() -> None:
    assert parse_lengths("4k, 8K,300") == [4096, 8192, 300]
    with pytest.raises(ValueError, match="not a list of lengths"):
        parse_lengths("0")


# -- the picture ---------------------------------------------------------------------------------------------------


def test_the_heatmap_shows_what_was_counted(shipped: RecallResult, tmp_path: Path) -> None:
    figure = shipped.plot(tmp_path / "recall.png", bins=5)
    drawn = figure.axes[0].images[0].get_array()
    depths = shipped.by_depth(5)
    assert drawn.shape == (5, 2)
    for column, length in enumerate((128, 1024)):
        for row in range(5):
            assert drawn[row][column] == pytest.approx(depths[length, row][0])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["128", "1k"]
    with pytest.raises(ValueError, match="'vt' was not measured"):
        shipped.plot(task="vt")
