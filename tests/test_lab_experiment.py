"""The lab's experiment: seeds, results on disk, and that what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lab.conditions.table import BEFORE, find_conditions
from benchmarks.lab.experiment import journal, seeds
from benchmarks.lab.experiment.loop import do_all
from benchmarks.lab.experiment.plan import Experiment, runs_to_do
from benchmarks.lab.experiment.subject import Subject
from benchmarks.lab.models.architectures import ARCHITECTURES as ALL
from benchmarks.lab.models.architectures import Architecture
from benchmarks.lab.models.weights import RECORD, folder_of, load
from benchmarks.lab.training.data import DATA_KINDS

TINY = Architecture("lfm2", "LFM2", "short convolutions", ALL["lfm2"].build, lengths=(64,))


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Two steps from an untrained model, with everything in a temporary folder."""
    subject = Subject(TINY, build=tmp_path)
    TINY.untrained(0).save_pretrained(subject.folder)
    (subject.folder / RECORD).write_text("{}")
    return Experiment(subject, DATA_KINDS["sums"], steps=2, num_samples=2, num_chains=2, results=tmp_path / "results")


def test_seeds_that_choose_never_confirm() -> None:
    assert set(seeds.DEVELOPMENT_SEEDS).isdisjoint(seeds.CONFIRMATION_SEEDS)
    assert len(seeds.CONFIRMATION_SEEDS) >= 5 and len(seeds.CONFIRMATION_SEEDS_ELSEWHERE) >= 3
    assert {seeds.purpose_of(seed) for seed in seeds.DEVELOPMENT_SEEDS} == {"development"}
    assert {seeds.purpose_of(seed) for seed in seeds.CONFIRMATION_SEEDS} == {"confirmation"}
    with pytest.raises(ValueError, match="seed 77 is neither"):
        seeds.purpose_of(77)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no pretrained model in .*lfm2-seed3"):
        load(folder_of(TINY, 3, tmp_path))


# -- the journal ---------------------------------------------------------------------------------------------------


def line(condition: str, seed: int = 0, **settings: object) -> journal.Result:
    identity = {"architecture": "lfm2", "model_seed": 0, "data": "sums", "seed": seed, "condition": condition}
    return {**identity, "settings": settings}


def test_what_a_killed_process_left_is_passed_over(tmp_path: Path) -> None:
    path = journal.path_for("lfm2", "sums", tmp_path / "new folder")
    journal.append(path, line("none"))
    with path.open("a") as stream:
        stream.write('{"schema_version": 1, "architec')
    journal.append(path, line("freeze"))
    assert [result["condition"] for result in journal.read(path)] == ["none", "freeze"]
    assert journal.read_all(path.parent) == journal.read(path)
    assert journal.read(tmp_path / "nothing.jsonl") == []


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"schema_version": 99, **line("none")}) + "\n")
    with pytest.raises(ValueError, match="line 1 has schema version 99"):
        journal.read(path)


def test_only_what_is_missing_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    journal.append(path, line("none", lengths=(64,)))
    wanted = [line("none", lengths=(64,)), line("none", seed=1, lengths=(64,)), line("freeze")]
    assert journal.missing(path, wanted) == wanted[1:]
    with pytest.raises(ValueError, match="has none, seed 0, with other settings"):
        journal.missing(path, [line("none", lengths=(128,))])


# -- runs ----------------------------------------------------------------------------------------------------------


def test_runs_are_recorded_and_not_done_again(experiment: Experiment) -> None:
    conditions = find_conditions(["none", "qk_restore", "heads_1_restore", "freeze"])
    runs = runs_to_do(experiment, conditions, [0, 1])
    assert [str(run) for run in runs] == [
        "seed 0, before", "seed 0, none and 2 more", "seed 0, freeze",
        "seed 1, before", "seed 1, none and 2 more", "seed 1, freeze",
    ]  # fmt: skip
    said: list[str] = []
    do_all([(experiment, run) for run in runs[:2]], workers=1, say=said.append)
    assert said[0].startswith("1/2  lfm2 sums, seed 0, before:")

    results = {result["condition"]: result for result in journal.read(experiment.path)}
    assert list(results) == [BEFORE, "none", "qk_restore", "heads_1_restore"]
    before, none, restored = (results[name] for name in (BEFORE, "none", "qk_restore"))
    assert none["purpose"] == "development" and none["settings"]["steps"] == 2
    assert none["run"]["steps"] == 2 and none["run"]["seconds"] > 0 and before["run"] == {}
    assert none["drift"]["routing"] > 0 and none["drift"] == restored["drift"]
    assert none["recall"].keys() == {"colours", "letters", "owners"} and none["recall"]["colours"].keys() == {"64"}
    assert none["model"] == experiment.subject.digest and "trl" in none["versions"]
    assert restored["settings"]["repair"] == {"method": "qk"}

    left = runs_to_do(experiment, conditions, [0, 1])
    assert left == runs[2:]
    partly = runs_to_do(experiment, find_conditions(["none", "k_restore"]), [0])
    assert [[c.name for c in run.conditions] for run in partly] == [["k_restore"]]


@pytest.mark.slow
def test_two_processes_share_the_work(experiment: Experiment) -> None:
    runs = runs_to_do(experiment, [], [0, 1])
    do_all([(experiment, run) for run in runs], workers=2, say=lambda line: None)
    assert sorted(result["seed"] for result in journal.read(experiment.path)) == [0, 1]
    assert runs_to_do(experiment, [], [0, 1]) == []


def test_scores_depend_on_the_seed_only(experiment: Experiment) -> None:
    """The same texts for every condition of a seed, so that differences are paired; other texts for other seeds."""
    from benchmarks.lab.experiment.runs import do_run

    (first, _) = runs_to_do(experiment, [], [0, 1])
    once, again = (next(do_run(experiment, first)) for _ in range(2))
    assert once["recall"] == again["recall"] and once["reasoning"] == again["reasoning"]


def test_top_heads_come_from_one_order(experiment: Experiment) -> None:
    subject = experiment.subject
    order = subject.head_order
    assert sorted(order) == [(layer, head) for layer in (2, 5) for head in range(4)]
    assert subject.top_heads(1) == {order[0][0]: (order[0][1],)}
    assert sum(len(heads) for heads in subject.top_heads(5).values()) == 5
    assert Subject(TINY, build=subject.build).head_order == order  # kept on disk
