"""`routeguard diagnose …` on the shipped tiny hybrid."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from routeguard.cli.main import app
from routeguard.demo import tasks
from routeguard.demo.model import WEIGHTS, load_model, load_tokenizer

runner = CliRunner()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "needles.txt"
    path.write_text(tasks.needle_sample(600, 6, random.Random(0)).text)
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid with other keys in layer 5."""
    folder = tmp_path_factory.mktemp("tuned")
    model = load_model()
    model.model.layers[5].self_attn.k_proj.weight.data.mul_(-1.0)
    model.save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


def test_distance_of_one_model(text: Path, tmp_path: Path) -> None:
    arguments = ["diagnose", "distance", str(WEIGHTS), "--text", str(text), "--tokens", "256", "--sequences", "2"]
    result = runner.invoke(app, [*arguments, "--plot", str(tmp_path / "d.png")])
    assert result.exit_code == 0, result.output
    assert "2 × 256 tokens, 64 queries" in result.output and (tmp_path / "d.png").exists()
    parsed = json.loads(runner.invoke(app, [*arguments, "--json", "--layers", "5"]).stdout)
    assert parsed["schema_version"] == 1 and list(parsed["layers"]) == ["5"] and len(parsed["layers"]["5"]["mean"]) == 4


def test_distance_before_after_restored(text: Path, tuned: Path) -> None:
    arguments = ["diagnose", "distance", str(tuned), "--before", str(WEIGHTS), "--text", str(text), "--tokens", "128"]
    parsed = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    states = {name: state["layers"]["5"]["mean"] for name, state in parsed["states"].items()}
    assert parsed["schema_version"] == 1 and list(states) == ["before", "after", "restored"]
    assert states["restored"] == states["before"] != states["after"]
    assert {row["layer"] for row in parsed["ranking"]} == {2, 5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "is not a folder; give a model or adapter folder"),
        ([str(WEIGHTS), "--text", "/nowhere.txt"], "is not a file"),
        ([str(WEIGHTS), "--tokens", "9999999"], "Ask for less, or give more text"),
        ([str(WEIGHTS), "--layers", "x"], "is not a list of layer indices"),
        ([str(WEIGHTS), "--queries", "3"], "3 is not in the range"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["diagnose", "distance", *arguments])
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chains of thought of the demo, as JSON lines."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rng = random.Random(0)
    samples = [tasks.sum_sample(300, rng, sums="all", reach="previous").text for _ in range(12)]
    path.write_text("\n".join(json.dumps({"text": sample}) for sample in samples))
    return path


def test_locality_of_data_and_gradient(dataset: Path) -> None:
    arguments = ["locality", str(dataset), "--max-lag", "32", "--lengths", "8,64,1k"]
    bare = runner.invoke(app, [*arguments, "--tokenizer", str(WEIGHTS)])
    assert bare.exit_code == 0, bare.output
    assert "no model was given" in bare.output and "W_grad" not in bare.output
    options = ["--model", str(WEIGHTS), "--tokens", "96", "--sequences", "4", "--json"]
    parsed = json.loads(runner.invoke(app, [*arguments, *options]).stdout)
    assert parsed["schema_version"] == 1 and parsed["W_grad"]["width_tokens"] > 0
    assert [reach["length"] for reach in parsed["reaches"]] == [8, 64, 1024]
    assert list(parsed["gradient"]["layers"]) == ["2", "5"]


def test_formats_of_data_give_the_same_tokens(tmp_path: Path) -> None:
    from datasets import Dataset

    from routeguard.diagnostics.sample_draw import draw_tokens
    from routeguard.diagnostics.sample_layouts import sample_document

    tokenizer, text = load_tokenizer(), "let k07 4 2 river ask k07 4 2"
    expected = [tokenizer(text)["input_ids"]]
    rows = {
        "text": {"text": text},
        "prompt": {"prompt": "let k07 4 2 river ", "completion": "ask k07 4 2"},
        "messages": {"messages": [{"role": "user", "content": text}]},
        "input_ids": {"input_ids": expected[0]},
    }
    for name, row in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        assert draw_tokens(path, tokenizer, max_tokens=99).documents == expected, name
    Dataset.from_list([rows["text"]]).save_to_disk(tmp_path / "folder")
    Dataset.from_list([rows["text"]]).to_parquet(tmp_path / "data.parquet")
    (tmp_path / "plain.txt").write_text(text)
    for name in ("folder", "data.parquet", "plain.txt"):
        assert draw_tokens(tmp_path / name, tokenizer, max_tokens=99).documents == expected, name
    drawn = draw_tokens(tmp_path / "prompt.jsonl", tokenizer, max_tokens=99, with_labels=True)
    assert drawn.labels == [[-100] * 6 + expected[0][6:]]
    assert draw_tokens(tmp_path / "text.jsonl", tokenizer, max_tokens=99, with_labels=True).labels is None
    with pytest.raises(ValueError, match="name one column"):
        sample_document(tokenizer, {"other": text})
    assert sample_document(tokenizer, {"other": text}, column="other").ids == expected[0]
    with pytest.raises(ValueError, match="no column 'x'"):
        sample_document(tokenizer, {"other": text}, column="x")


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ('{"text": "a"}', [], "give --tokenizer FOLDER or --model FOLDER"),
        ('{"text": "a"}', ["--tokenizer", "/nowhere"], "/nowhere is not a folder; give a folder with a tokenizer"),
        ("{broken", ["--tokenizer", str(WEIGHTS)], "is not JSONL"),
        ("[1]", ["--tokenizer", str(WEIGHTS)], "holds no list of samples"),
        ('{"text": "river"}', ["--tokenizer", str(WEIGHTS), "--lengths", "x"], "not a list of lengths like"),
    ],
)
def test_locality_errors(tmp_path: Path, content: str, arguments: list[str], message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    result = runner.invoke(app, ["locality", str(path), *arguments])
    assert result.exit_code == 2 and message in result.output
    assert runner.invoke(app, ["locality", str(tmp_path / "none.jsonl"), *arguments]).exit_code == 2


def test_json_has_null_for_what_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": "let k07 4 2 river let k07 4 2 river ask k07 4 2"}) for _ in range(9))
    )
    arguments = ["locality", str(path), "--tokenizer", str(WEIGHTS), "--max-lag", "8", "--lengths", "64k", "--json"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output

    def refuse(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    parsed = json.loads(result.stdout, parse_constant=refuse)
    assert parsed["unknown"] == [65536] and parsed["reaches"][0]["share"] is None
    assert parsed["reaches"][0]["verdict"] == "unknown"


def test_locality_reads_chats_and_leaves_prompts_out(tmp_path: Path) -> None:
    prompt = "let k07 4 2 river let k07 4 2 river ask k07 4 2 " * 8
    layouts = {
        "chat": {
            "prompt": [{"role": "user", "content": prompt}],
            "completion": [{"role": "assistant", "content": "4 2"}],
        },
        "other": {"problem": prompt, "solution": "4 2"},
    }
    for name, row in layouts.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    options = ["--model", str(WEIGHTS), "--tokens", "32", "--sequences", "2", "--max-lag", "8", "--lengths", "8"]
    chat = runner.invoke(app, ["locality", str(tmp_path / "chat.jsonl"), *options])
    assert chat.exit_code == 0 and "sequences of the data with no label that counts" in chat.output, chat.output
    other = runner.invoke(app, ["locality", str(tmp_path / "other.jsonl"), *options])
    assert other.exit_code == 2 and "columns problem, solution" in other.output
    by_name = runner.invoke(app, ["locality", str(tmp_path / "other.jsonl"), *options, "--column", "problem"])
    assert by_name.exit_code == 0, by_name.output


def test_refusals_come_before_the_work(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")  # would be refused itself, later
    layer = ["--layer", "5", "--head", "0"]
    for command in (["distance", nowhere], ["picture", nowhere, *layer], ["importance", nowhere], ["drift", nowhere]):
        result = runner.invoke(app, ["diagnose", *command, "--plot", "x.foo"])
        assert result.exit_code == 2 and "x.foo has no suffix of a picture; there are" in result.output, command
    result = runner.invoke(app, ["locality", nowhere, "--plot", str(tmp_path)])
    assert result.exit_code == 2 and "no suffix of a picture" in result.output
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 " * 1000)
    result = runner.invoke(app, ["diagnose", "distance", str(WEIGHTS), "--text", str(latin)])
    assert result.exit_code == 2 and "latin.txt is not UTF-8" in result.output


@pytest.mark.parametrize("command", [["distance"], ["picture", "--layer", "5", "--head", "0"]])
def test_lengths_beyond_the_positions_need_insistence(command: list[str], tmp_path: Path, text: Path) -> None:
    model = load_model()
    model.config.max_position_embeddings = 100
    model.save_pretrained(tmp_path)
    load_tokenizer().save_pretrained(tmp_path)
    arguments = ["diagnose", command[0], str(tmp_path), *command[1:], "--text", str(text), "--tokens", "128", "--json"]
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 2 and "beyond the 100 positions" in refused.output
    assert runner.invoke(app, [*arguments, "--insist"]).exit_code == 0


def test_picture_of_a_head(text: Path, tuned: Path, tmp_path: Path) -> None:
    arguments = ["diagnose", "picture", str(tuned), "--before", str(WEIGHTS), "--layer", "5", "--head", "1"]
    result = runner.invoke(app, [*arguments, "--text", str(text), "--tokens", "64", "--json"])
    parsed = json.loads(result.stdout)
    assert parsed["schema_version"] == 1 and list(parsed["states"]) == ["before", "after", "restored"]
    assert parsed["states"]["restored"] == parsed["states"]["before"] != parsed["states"]["after"]
    assert len(parsed["log_ratio"]) == 64
    assert list(parsed["last_query"]) == ["before", "after", "restored"]
    for name, last in parsed["last_query"].items():  # 64 tokens in 64 cells: the map's own last row
        assert last == pytest.approx(parsed["states"][name][-1], abs=1e-6) and sum(last) == pytest.approx(1, abs=1e-4)
    assert len(result.stdout.splitlines()) < 4 * 64 + 60  # a line a row, not a line a number


def test_importance_names_the_layer_that_recall_hangs_on(tmp_path: Path) -> None:
    arguments = [
        "diagnose",
        "importance",
        str(WEIGHTS),
        "--tasks",
        "demo_needles",
        "--lengths",
        "256",
        "--samples",
        "4",
    ]
    parsed = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert parsed["schema_version"] == 1 and parsed["full"]["demo_needles"] > 0.9
    assert parsed["ranking"][0]["layer"] == 2 and parsed["ranking"][0]["importance"] > 0.5
    result = runner.invoke(app, [*arguments, "--heads", "--layers", "2", "--plot", str(tmp_path / "heads.png")])
    assert result.exit_code == 0 and "layer 2 head 0" in result.output and (tmp_path / "heads.png").exists()
