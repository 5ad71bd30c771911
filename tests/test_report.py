"""`routeguard report`: what is collected from a run, the page, the model card, and what does not fit together."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from routeguard import QKRestore, RecallProbe, RouteGuard, Track, __version__, find_routes, read_recall
from routeguard.cli.main import app
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.drift.record import read_drift
from routeguard.recall.probe_failures import Failure
from routeguard.recall.probe_record import append_failure
from routeguard.report.card import render_card
from routeguard.report.chart import Line, line_chart
from routeguard.report.collect import collect_run
from routeguard.report.page import render_page
from routeguard.report.words import protection, spread, summary
from routeguard.routes.wording import plural_of
from tests.loops import tiny
from tests.test_recall_gate import result
from tests.trainers import run

pytestmark = pytest.mark.filterwarnings("ignore")
runner = CliRunner()
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page; fails where a tag is not closed in order, an id is there twice, or something is fetched."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.pictures: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not {"src", "href", "onclick", "onload", "style"} & set(found)
        self.tags.append(tag)
        self.ids += [found["id"]] if found.get("id") else []
        if found.get("role") == "img":
            self.pictures.append(found["aria-labelledby"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


@pytest.fixture(scope="module")
def tracked_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of Track with QKRestore, probed, with a checkpoint at step 2 and at the end."""
    folder = tmp_path_factory.mktemp("runs") / "tracked"
    probe = RecallProbe(tasks="demo_needles", lengths=(40, 56), every=2, num_samples=4, tokenizer=load_tokenizer())
    guard = RouteGuard(Track(), QKRestore(), probe=probe)
    run(load_model(), folder, guard, save_strategy="steps", save_steps=2)
    return folder


@pytest.fixture
def tracked(tracked_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tracked_once, tmp_path / "tracked"))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen run that saved no checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "frozen"
    run(tiny("lfm2"), folder, RouteGuard())
    return folder


def forget(folder: Path, *fields: str) -> None:
    """Make a guard's file one of an earlier version, which did not have these fields."""
    for path in folder.rglob("routeguard.json"):
        data = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in data.items() if name not in fields}))


def test_what_is_collected_is_what_the_run_left(tracked: Path) -> None:
    found = collect_run(tracked)
    routes = find_routes(load_model())
    assert found.coverage is not None and found.state is not None and found.drift is not None
    held = found.coverage
    assert (held.num_tensors, held.num_parameters) == (len(routes.parameters), routes.num_parameters)
    assert held.num_rows == sum(route.num_rows for route in routes)
    assert held.share == pytest.approx(routes.share) and found.state.layers == routes.layers
    assert found.drift.samples == tuple(read_drift(tracked / "routeguard/drift.jsonl")[1])
    assert found.restore is not None
    restored = json.loads((tracked / "routeguard/restore.json").read_text())
    assert json.loads(json.dumps(found.restore.to_dict())) == restored
    assert found.probed == read_recall(tracked / "routeguard/recall.jsonl") and sorted(found.probed) == [0, 2, 4]
    assert list(found.states_during) == ["before (step 0)", "after (step 4)", "restored (step 4)"]
    assert found.training is not None and (found.training.step, found.training.max_steps) == (4, 4)
    assert found.warnings == ()
    recorded = {entry.name: entry.value for entry in found.environment}
    assert recorded["transformers"] == transformers.__version__ and recorded["model type"] == "lfm2"
    assert recorded["torch"] == metadata.version("torch") and recorded["python"] == platform.python_version()
    assert recorded["routeguard"] == __version__
    assert recorded["tokenizers"] is None  # no file of this run says it


def test_without_a_checkpoint_the_kept_start_tells_what_was_held(tracked: Path) -> None:
    told = collect_run(tracked).coverage
    forget(tracked, "coverage", "versions")
    whole = collect_run(tracked).coverage
    assert told is not None and replace(told, source="checkpoint-4 (checkpoint)") == whole
    for checkpoint in tracked.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    found = collect_run(tracked)
    assert whole is not None and found.coverage is not None
    assert found.coverage.num_layers == whole.num_layers == 6
    assert found.coverage.layers == whole.layers and found.coverage.num_rows == whole.num_rows
    assert found.coverage.share is None and "share of the model not recorded" in render_card(found)
    assert found.training is None and any("trainer_state.json" in text for text in found.absent)


def test_a_run_with_an_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    run(
        get_peft_model(tiny("lfm2"), lora),
        tmp_path,
        RouteGuard(Track(), QKRestore()),
        save_strategy="steps",
        save_steps=4,
    )
    found = collect_run(tmp_path)
    assert found.coverage is not None and found.warnings == ()
    names = find_routes(tiny("lfm2")).parameters
    assert [name for layer in found.coverage.layers for name, *_ in layer.tensors] == list(names)
    assert found.coverage.num_adapter_tensors == 4  # A and B of the queries of two layers
    assert {entry.name for entry in found.environment if entry.value} >= {"peft"}
    forget(tmp_path, "coverage", "versions")
    earlier = collect_run(tmp_path)  # from the kept start
    assert earlier.coverage is not None and earlier.coverage.num_adapter_tensors == 4
    assert earlier.coverage.layers == found.coverage.layers


def test_a_frozen_run_with_an_adapter_tells_what_it_held(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny("qwen3_5_text")  # its queries lie beside a gate, so LoRA's A is not held
    share = find_routes(model).share
    run(get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])), tmp_path, RouteGuard())
    found = collect_run(tmp_path)
    held = found.coverage
    assert held is not None and held.source == "routeguard.json" and held.num_adapter_tensors == len(held.layers)
    assert held.share == pytest.approx(share) and held.model_type == "qwen3_5_text"
    page = Page(render_page(found)).text
    assert "Tensors, from routeguard.json" in page and f"{held.num_rows:,} rows" in page
    forget(tmp_path, "coverage")
    assert collect_run(tmp_path).coverage is None  # nothing else in the folder tells


def test_what_a_frozen_run_did_not_record_is_not_made_up(frozen: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(frozen, tmp_path / "frozen"))
    forget(copy, "coverage", "versions")
    found = collect_run(copy)
    assert not any(entry.value for entry in found.environment)
    assert found.coverage is None and found.probed == {} and found.restore is None and found.warnings == ()
    page = Page(render_page(found)).text
    assert "0 in every layer at each of the 4 recorded steps" in page and "not recorded" in page
    assert "Recall during the run: no routeguard/recall.jsonl" in page and "Recall during the run\n" not in page
    card = render_card(found)
    assert "| Held | not recorded |" in card and "Recall was not measured." in card
    assert card.startswith("## Trained with routing protection\n")


def test_the_page_is_whole_and_stands_alone(tracked: Path) -> None:
    recall = {"before": result({64: [1.0] * 20}), "after": result({64: [1.0] * 8 + [0.0] * 12})}
    source = render_page(collect_run(tracked, recall=recall, reasoning=(0.25, 0.5)))
    page = Page(source)
    assert page.pictures == ["drift-alt", "recall-alt"] and set(page.pictures) <= set(page.ids)
    assert page.tags.count("table") == page.tags.count("tbody") >= 10
    assert page.tags.count("caption") == page.tags.count("thead")
    assert "script" not in page.tags and not re.search(r"https?://|url\(|@import", source)
    for heading in ("What was held", "Drift", "Recall during the run", "Gate", "Environment", "Not in this report"):
        assert heading in page.words
    assert "before and after: FAILED" in page.words and "+0.60 [" in page.text
    assert "+0.25" in page.words  # the change of the reasoning score
    assert "prefers-color-scheme: dark" in source and "@media print" in source
    for value in read_drift(tracked / "routeguard/drift.jsonl")[1][-1].factors.values():
        assert f"{value:.4g}" in page.words


def test_texts_of_the_run_stay_text(tracked: Path) -> None:
    reason = "ValueError: <script>alert('x')</script> & \"y\""
    append_failure(tracked / "routeguard/recall.jsonl", Failure(4, reason))
    strange = tracked.rename(tracked.with_name("a <b> & c"))
    source = render_page(collect_run(strange))
    page = Page(source)
    assert "script" not in page.tags and "b" not in page.tags
    assert reason in page.text and "a <b> & c" in page.words
    assert "<script>" not in render_card(collect_run(strange))


def test_failed_measurements_are_warned_about(tracked: Path) -> None:
    record = tracked / "routeguard/recall.jsonl"
    for step in (5, 6, 7):
        append_failure(record, Failure(step, "OutOfMemoryError: no room"))
    (warning,) = collect_run(tracked).warnings
    assert "3 measurements FAILED" in warning and "at step 5, 6, 7" in warning and "given up" in warning
    assert warning in Page(render_page(collect_run(tracked))).words


def test_what_does_not_fit_together_is_warned_about(tracked: Path, frozen: Path, tmp_path: Path) -> None:
    kept = tracked / "routeguard"
    restore = json.loads((kept / "restore.json").read_text())
    changed = json.loads(json.dumps(restore))
    changed["layers"][0]["drift_before"]["query"] *= 1.5
    (kept / "restore.json").write_text(json.dumps(changed))
    assert "not that of the last recorded step" in collect_run(tracked).warnings[0]
    (kept / "restore.json").unlink()
    found = collect_run(tracked)
    assert "no report says that it did" in found.warnings[0] and "qk was asked for, and is not recorded" in render_card(
        found
    )
    (kept / "recall.1.jsonl").write_text("")
    assert "recall.1.jsonl" in collect_run(tracked).warnings[-1]
    copy = Path(shutil.copytree(frozen, tmp_path / "frozen"))
    (copy / "routeguard/restore.json").write_text(json.dumps(restore))
    shutil.copy(kept / "reference.safetensors", copy / "routeguard")
    leftover = collect_run(copy)
    assert leftover.restore is None and leftover.coverage == collect_run(frozen).coverage
    assert [text.split()[0] for text in leftover.warnings if "left over from an earlier run" in text] == [
        "reference.safetensors",
        "restore.json",
    ]


@pytest.mark.parametrize(
    ("name", "part"), [("drift.jsonl", "drift"), ("recall.jsonl", "probed"), ("restore.json", "restore")]
)
def test_a_damaged_file_is_told_and_the_rest_is_shown(name: str, part: str, tracked: Path) -> None:
    whole = collect_run(tracked)
    (tracked / "routeguard" / name).write_text('{"schema_version": 1, broken\n{"step": 1}\n')
    found = collect_run(tracked)
    assert getattr(whole, part) and not getattr(found, part)
    assert any(text.startswith("not read: ") and name in text for text in found.warnings)
    assert found.coverage == whole.coverage
    assert name in Page(render_page(found)).text


def test_measurements_that_do_not_pair_get_no_verdict(tracked: Path) -> None:
    found = collect_run(tracked, recall={"before": result({64: [1.0] * 20}), "after": result({32: [1.0] * 20})})
    (verdict,) = found.verdicts
    assert verdict.report is None and "0 are the same" in verdict.problem
    assert "before and after: no verdict" in Page(render_page(found)).text


def test_the_card_says_what_was_done(tracked: Path) -> None:
    recall = {"before": result({64: [1.0] * 20}), "restored": result({64: [1.0] * 19 + [0.0]})}
    recall["restored"].settings["model"], recall["before"].settings["model"] = "tuned", "untuned"
    found = collect_run(tracked, recall=recall)
    assert next(entry.value for entry in found.environment if entry.name == "base model") == "untuned"
    card = render_card(found)
    assert card.startswith("## Trained with routing protection\n")
    assert (
        "| Restore at the end | QK-Restore: 4 tensors in 2 layers" in card
        and "before what was done at the end |" in card
    )
    assert "| restored | 0.95 [0.76–0.99] |" in card and "| Recall gate, before and restored | passed |" in card
    (tracked / "routeguard/restore.json").unlink()
    assert "and not protected" in render_card(collect_run(tracked))
    assert "Trained with routing protection" not in render_card(collect_run(tracked))


def test_the_command(tracked: Path, tmp_path: Path) -> None:
    result({64: [1.0] * 20}).save(tmp_path / "before/recall.json")
    done = runner.invoke(app, ["report", str(tracked), "--recall-before", str(tmp_path / "before")])
    assert done.exit_code == 0, done.output
    page = tracked / "routeguard/report.html"
    assert str(page) in done.output and "Recall measured beside the run" in Page(page.read_text(encoding="utf-8")).words
    data = json.loads(runner.invoke(app, ["report", str(tracked), "--json"]).output)
    assert data["kind"] == "run_report" and data["coverage"]["num_tensors"] == 4 and len(data["probed"]) == 3
    assert runner.invoke(app, ["report", str(tracked), "--card"]).output == render_card(collect_run(tracked))
    assert runner.invoke(app, ["report", str(tracked), "--output", str(tmp_path / "x/y.html")]).exit_code == 0
    assert (tmp_path / "x/y.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "looked for routeguard.json, drift.jsonl, recall.jsonl"),
        (["{run}", "--card", "--json"], "give one of them"),
        (["{run}", "--card", "--output", "x.html"], "--output is for the page"),
        (["{run}", "--reasoning-after", "0.5"], "together"),
        (["{run}", "--reasoning-before", "nan", "--reasoning-after", "0.5"], "are scores"),
        (["{run}", "--recall-before", "nowhere"], "nowhere is not a file"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, frozen: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["report", *(a.format(tmp=tmp_path, run=frozen) for a in arguments)])
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output
    with pytest.raises(ValueError, match="give before, after, restored"):
        collect_run(frozen, recall={"later": result({64: [1.0]})})


def test_many_layers_are_drawn_as_mean_and_largest_and_heads_as_shades(tracked: Path) -> None:
    lines = (tracked / "routeguard/drift.jsonl").read_text().splitlines()
    drift = {str(layer): {"query": 0.1 * layer, "key": 0.01 * layer} for layer in range(20)}
    step = {"step": 4, "drift": drift, "routing": {"3": [0.25, 0.5], "7": [0.75]}}
    (tracked / "routeguard/drift.jsonl").write_text("\n".join([lines[0], json.dumps(step)]))
    source = render_page(collect_run(tracked))
    page = Page(source)
    assert 'class="shade10">0.75<' in source and 'class="shade3">0.25<' in source and "head 1" in page.words
    assert "query, largest layer" in page.words and "layer 3 query" not in page.words
    assert page.words.count("1.9") == 1  # each layer is in the table


def test_a_chart_draws_its_numbers() -> None:
    source = line_chart(
        [Line("a", [(0, 0.0), (5, 1.0), (10, float("nan"))], 0)], name="x", alt="<alt>", x_label="x", y_label="y"
    )
    page = Page(source)
    assert "<alt>" in page.words and page.tags.count("circle") == 2  # the number that is none is left out
    (points,) = re.findall(r'points="([^"]+)"', source)
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in points.split())
    assert x1 > x0 and y1 < y0  # up is more
    assert Page(line_chart([Line("a", [], 0)], name="x", alt="", x_label="", y_label="")).tags.count("circle") == 0
    assert spread(range(100), 3) == [0, 50, 99] and spread([1, 2], 3) == [1, 2]


def test_a_frozen_run_needs_no_torch_but_for_its_drift(frozen: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(frozen, tmp_path / "frozen"))
    (copy / "routeguard/drift.jsonl").unlink()
    code = (
        "import sys; from pathlib import Path\n"
        "from routeguard.report.collect import collect_run; from routeguard.report.page import render_page\n"
        f"render_page(collect_run(Path({str(copy)!r})))\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_summary_and_report_name_what_was_held(tmp_path: Path) -> None:
    guard = RouteGuard(roles=["query"])
    run(tiny(), tmp_path, guard)
    assert guard.summary is not None and "freeze: queries of the full-attention layers keep their bits" in guard.summary
    found = collect_run(tmp_path)
    assert protection(found) == "freeze: queries did not train"
    assert summary(found) == "The queries of the full-attention layers were guarded during fine-tuning."
    assert [plural_of(roles) for roles in (["key", "query"], ["value", "query", "key"], ["output"])] == [
        "queries and keys",
        "queries, keys and values",
        "outputs",
    ]
