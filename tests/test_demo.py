"""The demo: its toy language, the shipped model, and the run that makes the table."""

from __future__ import annotations

import io
import json
import random
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from routeguard.demo import evaluate, report, tasks
from routeguard.demo import run as demo_run
from routeguard.demo.console import show_demo
from routeguard.demo.model import (
    FULL_ATTENTION_LAYERS,
    WEIGHTS,
    build_model,
    build_tokenizer,
    load_model,
    load_tokenizer,
)

LET, ASK = tasks.LET, tasks.ASK


# -- the toy language ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_words, num_needles", [(16, 2), (63, 6), (500, 8)])
def test_needles_are_answered_by_the_text_before(num_words: int, num_needles: int) -> None:
    for seed in range(20):
        sample = tasks.needle_sample(num_words, num_needles, random.Random(seed))
        words = sample.words
        assert len(words) == len(sample.in_loss) == num_words
        defined = {words[i + 1]: words[i + 2 : i + 4] for i, word in enumerate(words) if word == LET}
        asked = {words[i + 1]: words[i + 2 : i + 4] for i, word in enumerate(words) if word == ASK}
        assert len(defined) == num_needles and asked == defined
        assert max(i for i, word in enumerate(words) if word == LET) < words.index(ASK)
        in_loss = {i for i, counts in enumerate(sample.in_loss) if counts}
        assert in_loss == {i + k for i, word in enumerate(words) if word == ASK for k in (2, 3)}


def test_needles_lie_at_any_depth() -> None:
    rng = random.Random(0)
    depths = [tasks.needle_sample(200, 1, rng).words.index(LET) for _ in range(300)]
    assert min(depths) < 10 and max(depths) > 180
    assert 85 < sum(depths) / len(depths) < 107  # uniform over the 193 places


def test_needles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="6 needles asked for in 47 words"):
        tasks.needle_sample(47, 6, random.Random(0))
    with pytest.raises(ValueError, match="give 1 to 40 needles"):
        tasks.needle_sample(1000, 41, random.Random(0))


def test_pretraining_shows_75_of_100_sums() -> None:
    shown = [tasks.is_known_sum(a, b) for a in range(10) for b in range(10)]
    assert sum(shown) == 75
    assert all(any(tasks.is_known_sum(a, b) for b in range(10)) for a in range(10))


@pytest.mark.parametrize("sums", ["known", "all"])
@pytest.mark.parametrize("reach", ["previous", "any"])
def test_running_sums_are_right(sums: tasks.Sums, reach: tasks.Reach) -> None:
    new_sums = distant = steps = 0
    for seed in range(30):
        sample = tasks.sum_sample(95, random.Random(seed), sums=sums, reach=reach)
        words = sample.words
        assert len(words) == len(sample.in_loss) <= 95
        values, latest = {words[1]: int(words[2])}, words[1]
        for i, word in enumerate(words):
            if word == ASK:
                source, added, total, name = words[i + 1], int(words[i + 3]), int(words[i + 5]), words[i + 8]
                assert total == (values[source] + added) % 10 and words[i + 9] == words[i + 5]
                assert name not in values
                distant += source != latest
                new_sums += not tasks.is_known_sum(values[source], added)
                steps += 1
                values[name], latest = total, name
        random_words = {i for i, word in enumerate(words) if word in tasks.FILLER}
        random_words |= {i + k for i, word in enumerate(words) if word == ASK for k in (3, 8)}
        assert not any(sample.in_loss[i] for i in random_words)
        assert all(sample.in_loss[i + 1] for i, word in enumerate(words) if word == tasks.EQUALS)
        asked = [sample.in_loss[i + 1] for i, word in enumerate(words) if word == ASK]
        assert set(asked) == {reach == "previous"}
    assert steps > 100
    assert (new_sums > 0) == (sums == "all")
    assert (distant > 0) == (reach == "any")


def test_sums_in_reads_the_sums_back() -> None:
    sample = tasks.Sample(("let", "k01", "7", "ask", "k01", "+", "5", "=", "2", ";", "let", "k02", "2"), (False,) * 13)
    assert list(tasks.sums_in(sample)) == [(7, 7, 5)]


def test_a_sum_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 22 words, 21 given"):
        tasks.sum_sample(21, random.Random(0), sums="all", reach="any")


def test_samples_depend_on_the_seed_only() -> None:
    first, again, other = (tasks.needle_sample(99, 4, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


# -- tokenizer and model -------------------------------------------------------------------------------------------


def test_the_shipped_tokenizer_is_one_word_one_token() -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab() == {w: i for i, w in enumerate(tasks.VOCABULARY)}
    rng = random.Random(3)
    for sample in (tasks.needle_sample(120, 5, rng), tasks.sum_sample(95, rng, sums="all", reach="any")):
        ids = tokenizer(sample.text)["input_ids"]
        assert ids == [tasks.VOCABULARY.index(word) for word in (tasks.BOS, *sample.words)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample.text
    assert tokenizer("let unheard-of 4")["input_ids"][2] == tasks.VOCABULARY.index(tasks.UNK)


def test_what_ships_is_small_and_built_by_build_model() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) < 2_000_000
    shipped, built = load_model(), build_model()
    assert {n: p.shape for n, p in shipped.named_parameters()} == {n: p.shape for n, p in built.named_parameters()}
    assert shipped.num_parameters() == 244_544 and shipped.dtype == torch.float32
    full = [i for i, kind in enumerate(shipped.config.layer_types) if kind == "full_attention"]
    assert tuple(full) == FULL_ATTENTION_LAYERS


def test_the_shipped_model_recalls_and_knows_its_sums_and_a_random_one_does_not() -> None:
    tokenizer = load_tokenizer()
    shipped, untrained = load_model(), build_model()
    assert evaluate.recall(shipped, tokenizer, 128, num_samples=12) > 0.9
    assert evaluate.recall(shipped, tokenizer, 1024, num_samples=4) > 0.7
    assert evaluate.recall(untrained, tokenizer, 128, num_samples=12) < 0.3
    skill = evaluate.reasoning(shipped, tokenizer, num_samples=12)
    assert skill.known_sums > 0.95 and skill.far_lookups > 0.95
    assert skill.new_sums < 0.2  # what is left for fine-tuning to teach
    assert evaluate.reasoning(untrained, tokenizer, num_samples=12).known_sums < 0.3


def test_recall_needs_the_queries_and_keys() -> None:
    tokenizer, model = load_tokenizer(), load_model()
    torch.manual_seed(0)
    for layer in FULL_ATTENTION_LAYERS:
        torch.nn.init.normal_(model.get_parameter(f"model.layers.{layer}.self_attn.q_proj.weight"), std=0.1)
    assert evaluate.recall(model, tokenizer, 128, num_samples=12) < 0.5


def test_scores_do_not_depend_on_batching_or_padding() -> None:
    tokenizer, model = load_tokenizer(), load_model()
    rng = random.Random(0)
    samples = [tasks.sum_sample(n, rng, sums="all", reach="any") for n in (40, 95, 60)]
    ids, in_loss = evaluate.encode(samples, tokenizer)
    together = evaluate.right_next_token(model, ids)
    for i, sample in enumerate(samples):
        alone = evaluate.right_next_token(model, evaluate.encode([sample], tokenizer)[0])[0]
        assert together[i, : len(alone)].equal(alone)
        assert in_loss[i].sum() == sum(sample.in_loss)
    assert not model.training


def test_training_labels_are_the_tokens_that_count() -> None:
    data = demo_run.training_data(load_tokenizer(), num_samples=3, seed=0)
    assert data.column_names == ["input_ids", "labels"]
    for row in data:
        words = [tasks.VOCABULARY[i] for i in row["input_ids"]]
        assert words[0] == tasks.BOS
        for word, token, label in zip(words, row["input_ids"], row["labels"], strict=True):
            assert label in (token, -100)
            if word in tasks.FILLER or word == tasks.BOS:
                assert label == -100
            if word in (tasks.EQUALS, tasks.END):
                assert label == token
    assert data["input_ids"] != demo_run.training_data(load_tokenizer(), num_samples=3, seed=1)["input_ids"]


# -- the run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[demo_run.DemoResult, Path, list[str]]:
    folder, stages = tmp_path_factory.mktemp("demo"), []
    result = demo_run.run_demo(
        folder,
        all_modes=True,
        steps=3,
        progress=lambda stage, done, total: stages.append(f"{stage} {done}/{total}"),
        recall_lengths=(64, 128),
        num_samples=2,
    )
    return result, folder, stages


def test_a_short_run_gives_every_row(small_run: tuple[demo_run.DemoResult, Path, list[str]]) -> None:
    result, folder, stages = small_run
    expected = [demo_run.BEFORE]
    for variant in demo_run.ALL_VARIANTS:
        expected += [variant.name, *(repair.name for repair in variant.repairs)]
    assert list(result.names) == expected and len(result.rows) == len(expected) == 10
    drift = {row.name: row.drift for row in result.rows}
    unguarded = drift["unguarded"]
    assert unguarded > 1e-4
    assert drift[demo_run.BEFORE] == drift["guarded (freeze)"] == drift["restored afterwards"] == 0.0
    assert drift["interpolated afterwards"] == pytest.approx(unguarded / 2, rel=1e-3)
    assert drift["values restored"] == unguarded
    assert 0 < drift["tracked, then qk_pro"] < unguarded
    assert 0 < drift["guarded (low_lr)"] < 0.3 * unguarded
    assert 0 < drift["guarded (anchor)"] < unguarded
    assert all(set(row.recall) == {64, 128} for row in result.rows)
    assert "unguarded: fine-tuning 3/3" in stages
    assert len(list((folder / "runs").iterdir())) == len(demo_run.ALL_VARIANTS)


def test_the_same_arguments_give_the_same_rows(
    small_run: tuple[demo_run.DemoResult, Path, list[str]], tmp_path: Path
) -> None:
    again = demo_run.run_demo(tmp_path, steps=3, recall_lengths=(64, 128), num_samples=2)
    first = {row.name: replace(row, train_seconds=0.0) for row in small_run[0].rows}
    assert list(again.names) == [
        demo_run.BEFORE,
        "unguarded",
        "restored afterwards",
        "guarded (freeze)",
        "guarded (l2_sp)",
    ]
    for row in again.rows:
        assert replace(row, train_seconds=0.0) == first[row.name]


def test_report_files_hold_the_measured_rows(
    small_run: tuple[demo_run.DemoResult, Path, list[str]], tmp_path: Path
) -> None:
    result = small_run[0]
    report.write_json(result, tmp_path / "demo.json")
    content = json.loads((tmp_path / "demo.json").read_text())
    assert content["schema_version"] == report.SCHEMA_VERSION and content["steps"] == 3
    assert [(row["name"], row["drift"]) for row in content["rows"]] == [(row.name, row.drift) for row in result.rows]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.table(result))
    text = console.export_text()
    for row in result.rows:
        line = next(line for line in text.splitlines() if f" {row.name} " in line)
        assert f"{row.recall[128]:.2f}" in line and f"{row.drift:.2f}" in line


def test_several_seeds_show_mean_and_range() -> None:
    reasoning = evaluate.Reasoning(1.0, 1.0, 1.0)
    rows = tuple(
        demo_run.Row("guarded", seed, {64: value}, reasoning, 0.0, 1.0) for seed, value in enumerate((0.2, 0.6))
    )
    shown = report.table(demo_run.DemoResult(rows, steps=1, seeds=2, seconds=1.0))
    assert list(shown.columns[1].cells) == ["0.40\n0.20–0.60"]


def test_the_plot_is_drawn(small_run: tuple[demo_run.DemoResult, Path, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report.write_plot(small_run[0], tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_is_skipped(
    small_run: tuple[demo_run.DemoResult, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not report.write_plot(small_run[0], tmp_path / "recall.png")
    assert not (tmp_path / "recall.png").exists()
    assert "pip install" in report.PLOT_HINT


@pytest.mark.parametrize("terminal", [True, False])
def test_show_demo_reports_progress_and_writes_both_files(
    small_run: tuple[demo_run.DemoResult, Path, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    pytest.importorskip("matplotlib")

    def finished_run(folder: Path, *, progress: demo_run.Progress, **settings: object) -> demo_run.DemoResult:
        assert settings == {"seeds": 1, "all_modes": True, "steps": 3}
        for stage, done, total in (("measuring", 0, 0), ("unguarded", 1, 3), ("unguarded", 3, 3), ("measuring", 0, 0)):
            progress(stage, done, total)
        return small_run[0]

    monkeypatch.setattr(demo_run, "run_demo", finished_run)
    text = io.StringIO()
    screen = Console(file=text, force_terminal=terminal, width=100)
    assert show_demo(tmp_path / "new" / "folder", all_modes=True, steps=3, console=screen) is small_run[0]
    assert {file.name for file in (tmp_path / "new" / "folder").iterdir()} == {"demo.json", "recall.png"}
    shown = text.getvalue()
    assert "restored afterwards" in shown and report.LEGEND.splitlines()[-1] in shown
    assert ("unguarded 1/3" in shown) != terminal


def test_the_command_line_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, dict[str, object]]] = []
    monkeypatch.setattr("routeguard.demo.console.show_demo", lambda output, **rest: calls.append((output, rest)))
    monkeypatch.setattr(sys, "argv", ["demo", "--all", "--seeds", "3", "--steps", "40", "--output", "elsewhere"])
    runpy.run_module("routeguard.demo", run_name="__main__")
    assert calls == [(Path("elsewhere"), {"seeds": 3, "all_modes": True, "steps": 40})]


def test_impossible_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds=0"):
        demo_run.run_demo(tmp_path, seeds=0)
    with pytest.raises(ValueError, match="steps=0"):
        demo_run.run_demo(tmp_path, steps=0)
