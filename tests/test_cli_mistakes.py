"""What a user can get wrong on the command line of recall, gate, locality and diagnose: one clear message each."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from routeguard.cli.main import app
from routeguard.demo import tasks
from routeguard.demo.model import WEIGHTS

# Command line and a part of the message. Names in braces are the files that the fixture makes.
MODELS = [
    ("{none}", "none is not a folder; give a model or adapter folder"),
    ("{file}", "file is not a folder; give a model or adapter folder"),
    ("{empty}", "empty holds no model: there is no config.json"),
    ("{no_model}", "no_model holds no model: there is no config.json"),
    ("{no_weights}", "no_weights: its model cannot be loaded"),
    ("{no_tokenizer}", "no_tokenizer: its tokenizer is missing; `tokenizer.save_pretrained("),
    ("{broken_config}", "config.json is not JSON"),
    ("{broken_tokenizer}", "broken_tokenizer: its tokenizer cannot be loaded"),
    ("{cut_weights}", "cut_weights: its model cannot be loaded"),
    ("{unknown_type}", "unknown_type: its model cannot be loaded"),
    ("{other_vocabulary}", "its tokenizer has tokens up to 88, its model knows 83"),
    ("{broken_adapter}", "adapter_config.json is not JSON"),
    ("{adapter}", "its base model '{none}' cannot be loaded"),
]
COMMANDS = {
    "recall": "recall {} --tasks demo_needles --lengths 128 --samples 8",
    "distance": "diagnose distance {} --text {{text}} --tokens 64",
    "picture": "diagnose picture {} --layer 2 --head 0 --text {{text}} --tokens 64",
    "importance": "diagnose importance {} --tasks demo_needles --lengths 64 --samples 1",
    "locality": "locality {{data}} --model {} --tokens 64 --sequences 1 --max-lag 8",
}
GOOD = {name: command.format("{good}") for name, command in COMMANDS.items()}
PICTURE = "diagnose picture {good} --layer 2 --head 0"
NEEDLE = f"{PICTURE} --task demo_needles --length 64"
LOCALITY = "locality {data} --tokenizer {good}"
GATE = "gate {result} {result}"
MISTAKES = [
    (f"{GOOD['recall']} --device nosuch", "--device 'nosuch' cannot be used here"),
    (f"{GOOD['recall']} --device meta", "--device 'meta' holds no numbers"),
    (f"{GOOD['recall']} --device cuda:99", "--device 'cuda:99' cannot be used here"),
    (f"{GOOD['recall']} --samples 0", "0 is not in the range"),
    (f"{GOOD['recall']} --lengths -128", "--lengths '-128' is not a list of lengths"),
    (f"{GOOD['recall']} --lengths 128,,", "is not a list of lengths"),
    (f"{GOOD['recall']} --lengths 99999", "99999 tokens are beyond the 4096 positions"),
    (f"{GOOD['recall']} --lengths 8", "too short for demo_needles"),
    (f"{GOOD['recall']} --tasks ''", "no recall task ''"),
    (f"{GOOD['recall']} --tasks demo_needle", "nearest 'demo_needles'"),
    (f"{GOOD['recall']} --tasks niah_single_2", "words that this tokenizer does not know"),
    (f"{GOOD['recall']} --method nosuch", "'nosuch' is not one of 'forced', 'generated'"),
    (f"{GOOD['recall']} --chat", "no chat template"),
    (f"{GOOD['recall']} --haystack {{none}}", "--haystack {none} is not a file"),
    (f"{GOOD['recall']} --haystack {{empty}}", "--haystack {empty} is not a file"),
    (f"{GOOD['recall']} --haystack {{bytes}}", "{bytes} is not UTF-8 text"),
    (f"{GOOD['recall']} --reserve -5", "-5 is not in the range"),
    (f"{GOOD['recall']} --prefill 0", "0 is not in the range"),
    (f"{GOOD['recall']} --batch-tokens -1", "-1 is not in the range"),
    (f"{GOOD['recall']} --output {{file}}", "--output: {file} is a file, not a folder"),
    (f"{GOOD['recall']} --output {{file}}/below", "--output: {file} is a file, not a folder"),
    ("gate {none} {result}", "none is not a file; `routeguard recall MODEL --output FOLDER` writes recall.json"),
    ("gate {empty} {result}", "recall.json is not a file"),
    ("gate {broken} {result}", "broken.json is damaged"),
    ("gate {bytes} {result}", "is damaged"),
    ("gate {list} {result}", "this is not a recall result"),
    ("gate {half_result} {result}", "half_result.json"),
    (f"{GATE} --max-drop -5", "-5.0 is not in the range"),
    (f"{GATE} --max-drop 500", "500.0 is not in the range"),
    (f"{GATE} --max-drop nan", "max_drop lies above 0"),
    (f"{GATE} --confidence 100", "100.0 is not in the range"),
    (f"{GATE} --reasoning-before 0.5", "--reasoning-before and --reasoning-after together"),
    (f"{GATE} --reasoning-before nan --reasoning-after 1", "are scores, such as 0.62"),
    (f"{GOOD['distance']} --tokens 99999", "the text has 300 tokens; 1 × 99999 asked for"),
    (f"{GOOD['distance']} --tokens -5", "-5 is not in the range"),
    (f"{GOOD['distance']} --tokens 1", "1 is not in the range"),
    (f"{GOOD['distance']} --sequences 0", "0 is not in the range"),
    (f"{GOOD['distance']} --queries -1", "-1 is not in the range"),
    (f"{GOOD['distance']} --layers 1", "layers [1] have no full attention"),
    (f"{GOOD['distance']} --layers 99", "layers [99] have no full attention"),
    (f"{GOOD['distance']} --layers -1", "layers [-1] have no full attention"),
    (f"{GOOD['distance']} --layers two", "is not a list of layer indices"),
    (f"{GOOD['distance']} --text {{none}}", "--text {none} is not a file"),
    (f"{GOOD['distance']} --text {{bytes}}", "{bytes} is not UTF-8 text"),
    (f"{GOOD['distance']} --text {{prose}}", "of the text is unknown to this tokenizer (<unk>)"),
    ("diagnose distance {good} --tokens 64", "give a text in its own language (at the command line: --text FILE)"),
    (f"{GOOD['distance']} --before {{none}}", "none is not a folder"),
    (f"{GOOD['distance']} --before {{cut_weights}}", "cut_weights: its model cannot be loaded"),
    *[
        (f"{command} --plot {place}", message)
        for command in (GOOD["distance"], GOOD["picture"], GOOD["importance"], GOOD["locality"], "diagnose drift {run}")
        for place, message in (
            ("{none}.nosuch", "has no suffix of a picture; there are .eps"),
            ("{none}", "has no suffix of a picture"),
            ("{file}/below.png", "--plot: {file} is a file, not a folder"),
            ("{folder_png}", "folder.png is a folder; give a file"),
        )
    ],
    ("diagnose picture {good} --head 0", "Missing option '--layer'"),
    (f"{PICTURE} --tokens 0", "0 is not in the range"),
    (f"{GOOD['picture']} --layer 0", "layers [0] have no full attention"),
    (f"{GOOD['picture']} --layer 99", "layers [99] have no full attention"),
    (f"{GOOD['picture']} --head 4", "layer 2 has heads 0 to 3, asked for 4"),
    (f"{GOOD['picture']} --head -1", "layer 2 has heads 0 to 3, asked for -1"),
    (f"{GOOD['picture']} --depth 0.5", "--length, --depth and --seed belong to --task"),
    (f"{NEEDLE} --depth nan", "depth nan is not between 0"),
    (f"{NEEDLE} --depth -1", "depth -1.0 is not between 0"),
    (f"{NEEDLE} --length 8k", "beyond the 4096 positions"),
    (f"{NEEDLE} --length -10", "--length '-10' is not a list of lengths"),
    (f"{NEEDLE} --length 10", "too short for demo_needles"),
    (f"{NEEDLE} --tokens 64", "--text and --tokens choose a text"),
    (f"{PICTURE} --task nosuch", "no recall task 'nosuch'"),
    (f"{GOOD['importance']} --layers 0", "layers [0] have no full attention"),
    (f"{GOOD['importance']} --tasks nosuch", "no recall task 'nosuch'"),
    (f"{GOOD['importance']} --lengths 99999", "beyond the 4096 positions"),
    (f"{GOOD['importance']} --samples -1", "-1 is not in the range"),
    ("diagnose drift {none}", "no drift.jsonl at {none}"),
    ("diagnose drift {empty}", "To compare two checkpoints: `routeguard drift BASE TUNED`"),
    ("diagnose drift {file}", "file holds no step yet"),
    ("diagnose drift {broken}", "broken.json is damaged or no drift record"),
    ("diagnose drift {bytes}", "is damaged or no drift record"),
    ("diagnose drift {list}", "list.json is damaged or no drift record"),
    ("locality {none} --tokenizer {good}", "none is neither a file nor a dataset folder"),
    ("locality {empty} --tokenizer {good}", "empty is not a folder of datasets.save_to_disk"),
    ("locality {broken} --tokenizer {good}", "broken.json is not JSON"),
    ("locality {list} --tokenizer {good}", "list.json holds no list of samples"),
    ("locality {bytes} --tokenizer {good}", "{bytes} is not UTF-8 text"),
    ("locality {parquet} --tokenizer {good}", "is not a parquet file that can be read"),
    ("locality {data}", "give --tokenizer FOLDER or --model FOLDER"),
    ("locality {data} --tokenizer {empty}", "empty: its tokenizer is missing"),
    ("locality {data} --tokenizer {none}", "none is not a folder; give a folder with a tokenizer"),
    ("locality {data} --tokenizer {broken_tokenizer}", "broken_tokenizer: its tokenizer cannot be loaded"),
    ("locality {words} --tokenizer {good}", "give data in its own language"),
    ("locality {wrong_ids} --tokenizer {good}", "token ids or labels hold 'a'; give whole numbers"),
    ("locality {chat_text} --tokenizer {good}", "a sample's messages is a text; give a list"),
    (f"{LOCALITY} --column nosuch", "no column 'nosuch' in a sample"),
    (f"{LOCALITY} --max-lag 0", "0 is not in the range"),
    (f"{LOCALITY} --lengths x", "--lengths 'x' is not a list of lengths"),
    (f"{LOCALITY} --threshold nan", "a threshold in (0, 1)"),
    (f"{GOOD['locality']} --tokens 0", "0 is not in the range"),
    (f"{GOOD['locality']} --sequences -3", "-3 is not in the range"),
    (f"{GOOD['locality']} --tokens 99999", "beyond the 4096 positions"),
    (f"{GOOD['locality']} --tokens 99999 --insist", "one sequence takes 99999; ask for shorter ones"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files and folders by name, good and bad."""
    root = tmp_path_factory.mktemp("mistakes")
    found = {name: root / name for name in ("none", "file", "empty", "run")}
    found["file"].touch()
    found["empty"].mkdir()

    def model(name: str, *left_out: str, **contents: str | bytes) -> None:
        folder = found[name] = root / name
        shutil.copytree(WEIGHTS, folder, ignore=shutil.ignore_patterns(*left_out))
        for file, content in contents.items():
            path = folder / file.replace("__", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    config = json.loads((WEIGHTS / "config.json").read_text())
    tokenizer = json.loads((WEIGHTS / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["elephant"] = 88
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(found["none"])}
    model("good")
    model("no_model", "config.json", "model.safetensors")
    model("no_weights", "model.safetensors")
    model("no_tokenizer", "tokenizer*")
    model("broken_config", config__json="{broken")
    model("broken_tokenizer", tokenizer__json="{broken")
    model("cut_weights", model__safetensors=(WEIGHTS / "model.safetensors").read_bytes()[:20_000])
    model("unknown_type", config__json=json.dumps({**config, "model_type": "nosuch"}))
    model("other_vocabulary", tokenizer__json=json.dumps(tokenizer))
    model("broken_adapter", "config.json", "model.safetensors", adapter_config__json="{broken")
    model("adapter", "config.json", "model.safetensors", adapter_config__json=json.dumps(adapter))

    rng = random.Random(0)
    sums = [{"text": tasks.sum_sample(300, rng, sums="all", reach="previous").text} for _ in range(8)]
    files = {
        "text": ("text.txt", tasks.needle_sample(300, 6, rng).text),
        "prose": ("prose.txt", "In the beginning there was a word. " * 40),
        "data": ("data.jsonl", "\n".join(map(json.dumps, sums))),
        "words": ("words.jsonl", '{"text": "some words of another language"}'),
        "wrong_ids": ("wrong_ids.jsonl", '{"input_ids": ["a", 2]}'),
        "chat_text": ("chat_text.jsonl", '{"messages": "hello"}'),
        "broken": ("broken.json", "{broken"),
        "list": ("list.json", "[1]"),
        "half_result": ("half_result.json", '{"kind": "recall"}'),
        "parquet": ("bytes.parquet", "no"),
    }
    for name, (file, content) in files.items():
        found[name] = root / file
        found[name].write_text(content)
    found["bytes"] = root / "bytes.jsonl"
    found["bytes"].write_bytes(b"\xff\xfe\x00")
    found["folder_png"] = root / "folder.png"
    found["folder_png"].mkdir()
    found["run"].mkdir()
    step = {"step": 1, "drift": {"2": {"query": 0.1, "key": 0.2}}}
    (found["run"] / "drift.jsonl").write_text(f'{{"schema_version": 1}}\n{json.dumps(step)}\n')
    found["result"] = root / "result"
    result = run(f"{GOOD['recall']} --output {{result}}", found)
    assert result.exit_code == 0, result.output
    return found


def run(line: str, places: dict[str, Path]) -> Result:
    return CliRunner().invoke(app, shlex.split(line.format(**places)))


def check(line: str, message: str, places: dict[str, Path]) -> None:
    result = run(line, places)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    expected = message.format(**places) if "{" in message else message
    assert expected in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake(line: str, message: str, places: dict[str, Path]) -> None:
    check(line, message, places)


@pytest.mark.parametrize(("folder", "message"), MODELS, ids=[folder for folder, _ in MODELS])
def test_model_folder(folder: str, message: str, places: dict[str, Path]) -> None:
    for name, command in COMMANDS.items():
        if name == "locality" or folder in ("{none}", "{cut_weights}", "{empty}", "{no_tokenizer}"):
            check(command.format(folder), message, places)
    check(COMMANDS["recall"].format(folder), message, places)


@pytest.mark.parametrize("line", [*GOOD.values(), NEEDLE, LOCALITY, GATE, "diagnose drift {run}"])
def test_the_same_commands_without_a_mistake(line: str, places: dict[str, Path]) -> None:
    result = run(line, places)
    assert result.exit_code == 0, result.output


def test_nothing_is_measured_for_a_picture_that_cannot_be_written(places: dict[str, Path]) -> None:
    result = run(f"{GOOD['distance']} --plot {{file}}/below.png", places)
    assert "mean" not in result.output


def test_out_of_memory_is_a_message(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nand more")

    monkeypatch.setattr("routeguard.diagnostics.distance.attention_distance", full)
    check(GOOD["distance"], "out of memory (CUDA out of memory. Tried to allocate 9 GiB); ask for fewer", places)

    def wrong(*args: object, **options: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("routeguard.diagnostics.distance.attention_distance", wrong)
    assert isinstance(run(GOOD["distance"], places).exception, RuntimeError)  # is not hidden
