"""The scripts of examples/: each is run as it is with few steps; `--unguarded` is the control of what it holds."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor

from routeguard import find_routes, read_drift
from routeguard.demo.model import WEIGHTS

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")
slow = pytest.mark.slow
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the scripts share, as they import it; fewer questions about recall."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "inputs", raising=False)
    import inputs

    monkeypatch.setattr(inputs, "TINY_ROWS", 128)
    AcceleratorState._reset_state(reset_partial_state=True)  # its precision is that of the first script otherwise
    monkeypatch.setitem(sys.modules, "inputs", inputs)  # taken away again afterwards
    return inputs


def run(name: str, output: Path, *options: str, steps: int = 2) -> dict[str, Any]:
    """The script's variables once it has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(sys, "argv", [name, "--steps", str(steps), "--output", str(output), *options])
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def changed(folder: Path, start: Path = WEIGHTS) -> tuple[list[bool], int]:
    """Whether each routed tensor of a saved model differs from the start, and how many of the others do."""
    before, after = weights(start), weights(folder)
    routed = find_routes(folder).parameters
    assert len(routed) == 4
    differs = {name: not torch.equal(before[name], after[name].to(before[name].dtype)) for name in before}
    return [differs[name] for name in routed], sum(differs[name] for name in before if name not in routed)


def largest_drift(output: Path) -> float:
    return max(read_drift(output / "routeguard" / "drift.jsonl")[1][-1].factors.values())


def check_whole(name: str, output: Path, **options: Any) -> dict[str, Any]:
    """A script that saves a whole model holds the routing rows and trains the rest; `--unguarded` moves them."""
    found = run(name, output / "guarded", **options)
    held, others = changed(output / "guarded")
    assert held == [False] * 4 and others > 20
    run(name, output / "free", "--unguarded", **options)
    held, others = changed(output / "free")
    assert held == [True] * 4 and others > 20
    return found


def test_full_fine_tuning(inputs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_whole("sft_full", tmp_path)
    assert list(found["probe"].results) == [0, 2]
    assert found["probe"].results[0].accuracy() > 0.9  # the model that ships can do it
    assert found["probe"].restored.lengths == (128, 512)
    assert largest_drift(tmp_path / "guarded") == largest_drift(tmp_path / "free") > 0.01  # until the restore
    text = capsys.readouterr().out
    for said in ("covered: 4 tensors", "routeguard/drift_max", "recall from step 0 to 2", "saved ", "eval_loss"):
        assert said in text
    assert text.count("OK: every row equals its start") == 1 and "entries differ" in text
    assert text.rstrip().splitlines()[-1].startswith("Look at: ")


@slow
def test_dpo(inputs: ModuleType, tmp_path: Path) -> None:
    found = check_whole("dpo", tmp_path)
    assert largest_drift(tmp_path / "guarded") == 0 < largest_drift(tmp_path / "free")
    assert list(found["probe"].results) == [0, 2]
    assert "rewards/margins" in found["trainer"].state.log_history[-1] | found["trainer"].state.log_history[-2]


@slow
def test_grpo(inputs: ModuleType, tmp_path: Path) -> None:
    found = check_whole("grpo", tmp_path)
    assert largest_drift(tmp_path / "guarded") == 0 < largest_drift(tmp_path / "free")
    assert list(found["probe"].results) == [0, 2]
    reward = found["number_is_right"]
    said = ["7", "let k07 3 = 7 ;", "8", "river", [{"role": "assistant", "content": "6 x 7: so it is 1,042"}]]
    assert reward(completions=said, answer=["7", "7", "7", "7", "1042"], prompts=said) == [1, 1, 0, 0, 1]


@slow
def test_accelerate_loop(inputs: ModuleType, tmp_path: Path) -> None:
    found = check_whole("accelerate_loop", tmp_path, steps=3)
    assert max(found["drift"].factors.values()) == 0 and found["step"] == 3
    assert found["before"].accuracy() > 0.9 and found["after"].lengths == found["before"].lengths


def check_adapter(name: str, output: Path) -> None:
    """No adapter on queries and keys, and the others learn; with `--unguarded` those have one that learns, too."""
    tensors = []
    for folder, options in (("held", ()), ("free", ("--unguarded",))):
        run(name, output / folder, *options)
        tensors.append(load_file(output / folder / "adapter_model.safetensors"))
    routed = {f"base_model.model.{route.removesuffix('.weight')}" for route in find_routes(WEIGHTS).parameters}
    held, free = (
        {key.rpartition(".lora_B")[0]: bool(b.any()) for key, b in found.items() if "lora_B" in key}
        for found in tensors
    )
    assert len(held) == 30 and all(held.values()) and not routed & set(held)
    assert routed < set(free) and all(free.values())
    assert set(free) - set(held) == routed


@slow
def test_lora(inputs: ModuleType, tmp_path: Path) -> None:
    check_adapter("sft_lora", tmp_path)


@slow
@needs_bitsandbytes
def test_qlora(inputs: ModuleType, tmp_path: Path) -> None:
    check_adapter("sft_qlora", tmp_path)


@slow
def test_repair_afterwards(inputs: ModuleType, tmp_path: Path) -> None:
    found = run("restore_after", tmp_path)
    assert changed(tmp_path / "tuned")[0] == [True] * 4
    assert changed(tmp_path / "restored")[0] == [False] * 4
    routed = find_routes(WEIGHTS).parameters
    start, tuned, restored, averaged = map(
        weights, (WEIGHTS, *(tmp_path / n for n in ("tuned", "restored", "averaged")))
    )
    for name, value in tuned.items():
        assert torch.equal(restored[name], start[name] if name in routed else value)
        torch.testing.assert_close(averaged[name], 0.9 * value + 0.1 * start[name])
    measured = {name: result.settings["model"] for name, result in found["recall"].items()}
    assert measured == {
        "before": str(WEIGHTS), **{name: str(tmp_path / name) for name in ("tuned", "restored", "averaged")}
    }  # fmt: skip
    run("restore_after", tmp_path)  # again, over what the first run wrote


# -- what `--model` changes: another hybrid, conversations, TRL's own precision ----------------------------------------

ROWS = {
    "open-r1/OpenR1-Math-220k": {
        "problem": ["1+1"] * 20,
        "messages": [[{"role": "user", "content": "1"}, {"role": "assistant", "content": f"={i}"}] for i in range(20)],
    },
    "trl-lib/ultrafeedback_binarized": {
        side: [[{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": text}] for i in range(20)]
        for side, text in (("chosen", "So 2"), ("rejected", "No"))
    },
    "openai/gsm8k": {"question": ["How many?"] * 2, "answer": ["2 * 700 = 1400.\n#### 1,400", "It is 3.\n#### -3"]},
}  # fmt: skip


@pytest.fixture
def hub(inputs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Rows in the shape of the Hub's, and questions that a tiny random model can be asked."""

    def load(name: str, *config: str, split: str) -> Dataset:
        assert name in ROWS and split.startswith("train") and config == (("main",) if "gsm8k" in name else ())
        return Dataset.from_dict(ROWS[name])

    monkeypatch.setattr(inputs, "load_dataset", load)
    asked = inputs.recall_questions
    few = {"lengths": (2000,), "num_samples": 2}
    monkeypatch.setattr(inputs, "recall_questions", lambda model: {**asked(model), **few})
    assert datasets.load_dataset is not load
    return inputs


def test_questions_have_their_number_as_answer(hub: ModuleType) -> None:
    rows = hub.questions("org/model")
    assert rows["answer"] == ["1400", "-3"] and set(rows.column_names) == {"prompt", "answer"}
    assert rows["prompt"][0] == [{"role": "user", "content": "How many?"}]
    for row, wanted in zip(hub.questions(hub.TINY), hub.preferences(hub.TINY), strict=True):
        left, right = row["prompt"].split()[-4:-1:2]
        assert left.startswith("k") and right.isdigit() and row["answer"].isdigit()
        assert wanted["chosen"].split()[0] == row["answer"] != wanted["rejected"].split()[0]


@slow
@pytest.mark.parametrize("name", ["sft_full", "dpo", "accelerate_loop"])
def test_another_model(name: str, hub: ModuleType, tmp_path: Path) -> None:
    from tests.loops import tiny
    from tests.recall_tokenizers import CHAT, characters

    model, tokenizer = tiny("qwen3_5_text"), characters()
    model.config.max_position_embeddings = 4096  # positions are rotary: no weight depends on their number
    tokenizer.chat_template = CHAT.replace("|", "/")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run(name, tmp_path / "out", "--model", str(tmp_path / "model"), steps=1)
    start, tuned = weights(tmp_path / "model"), weights(tmp_path / "out")
    routes = find_routes(tmp_path / "out")
    for parameter in routes.parameters:
        rows = routes.rows_of(parameter) or [(0, len(start[parameter]))]
        assert all(torch.equal(start[parameter][a:b], tuned[parameter][a:b]) for a, b in rows)
    assert sum(not torch.equal(start[key], value.to(start[key].dtype)) for key, value in tuned.items()) > 10
