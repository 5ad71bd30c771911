"""RecallProbe: what it measures and logs, how often, its threshold, resuming, refusals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from routeguard import RecallProbe, measure_recall, read_recall
from routeguard.demo.model import load_model, load_tokenizer
from tests.loops import tiny
from tests.trainers import dataset, make, run

pytestmark = pytest.mark.filterwarnings("ignore")


def probe(**changes) -> RecallProbe:
    settings = {
        "tasks": "demo_needles",
        "lengths": (40, 56),
        "every": 1,
        "num_samples": 2,
        "tokenizer": load_tokenizer(),
    }
    return RecallProbe(**{**settings, **changes})


def losses(trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_it_measures_what_measure_recall_measures(tmp_path: Path) -> None:
    watched = probe(lengths=(128, 256), num_samples=5)
    trainer = run(load_model(), tmp_path, watched, max_steps=2, learning_rate=3e-3)
    for step, model in ((0, load_model()), (2, trainer.model)):
        alone = measure_recall(model, load_tokenizer(), tasks="demo_needles", lengths=(128, 256), num_samples=5)
        assert [s.key for s in alone.scores] == [s.key for s in watched.results[step].scores]
        assert [s.score for s in alone.scores] == [s.score for s in watched.results[step].scores]
        nats = [s.nll for s in watched.results[step].scores]
        assert [s.nll for s in alone.scores] == pytest.approx(nats, rel=1e-3, abs=1e-5)
    assert watched.results[0].accuracy() == 1.0
    logged = [line for line in trainer.state.log_history if "recall/@128" in line]
    assert [line["step"] for line in logged] == [0, 1, 2]
    assert logged[-1]["recall/@256"] == watched.results[2].accuracy(length=256)
    assert read_recall(tmp_path / "routeguard" / "recall.jsonl") == watched.results


def test_the_time_share_decides_how_often(tmp_path: Path) -> None:
    generous = probe(every=None, share=1.0)
    run(tiny("lfm2"), tmp_path / "a", generous, max_steps=30)
    stingy = probe(every=None, share=1e-6)
    run(tiny("lfm2"), tmp_path / "b", stingy, max_steps=6)
    assert len(generous.results) > 2 and sorted(stingy.results) == [0, 6]


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_fall_warns_or_stops(action: str, tmp_path: Path) -> None:
    watched = probe(lengths=(128,), num_samples=5, max_drop=0.3, action=action)
    with pytest.warns(UserWarning, match=r"recall fell from 1.00 to 0\.\d\d at 128 tokens by step \d"):
        trainer = run(load_model(), tmp_path, watched, max_steps=6, learning_rate=1.0)
    assert trainer.state.global_step == (6 if action == "warn" else max(watched.results))
    assert action == "warn" or trainer.state.global_step < 6


def test_the_default_lengths_go_beyond_the_training(tmp_path: Path, capsys) -> None:
    watched = probe(lengths=None, num_samples=1)
    rows = {"train_dataset": dataset(length=30)}
    run(tiny("lfm2"), tmp_path / "a", watched, max_steps=1, trainer_options=rows)
    assert watched.results[0].lengths == (30, 60)
    tiny_positions = probe(lengths=None, num_samples=1)
    run(
        tiny("lfm2"), tmp_path / "b", tiny_positions, max_steps=1, trainer_options={"train_dataset": dataset(length=64)}
    )
    assert tiny_positions.results[0].lengths == (64,)  # the model has 64 positions
    assert "no length beyond the 64 tokens trained on" in capsys.readouterr().out


def test_the_default_lengths_are_those_of_the_rows_and_hold_the_needles(tmp_path: Path, capsys) -> None:
    """TRL's max_length is only a limit; 15 tokens have no place for six needles, 30 have."""
    short = probe(lengths=None, num_samples=1)
    rows = {"train_dataset": dataset(length=30)}
    run(tiny("lfm2"), tmp_path / "a", short, sft=True, max_steps=1, max_length=64, trainer_options=rows)
    assert short.results[0].lengths == (30, 60)
    shorter = probe(lengths=None, num_samples=3)
    run(tiny("lfm2"), tmp_path / "b", shorter, max_steps=1, trainer_options={"train_dataset": dataset(length=15)})
    assert shorter.results[0].lengths == (30, 60)
    assert "no length beyond" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="length 20 is too short for demo_needles"):
        run(tiny("lfm2"), tmp_path / "c", probe(lengths=(20, 40)), max_steps=1)


def test_that_no_length_goes_beyond_is_said_only_where_the_rows_tell(tmp_path: Path, capsys) -> None:
    for name, rows in (("rows", dataset(length=60)), ("stream", dataset(length=16).to_iterable_dataset())):
        options = {"max_length": 64, "trainer_options": {"train_dataset": rows}}
        run(tiny("lfm2"), tmp_path / name, probe(num_samples=1), sft=True, max_steps=1, **options)
        out = capsys.readouterr().out
        assert ("no length beyond the 60 tokens trained on" in out) == (name == "rows")
        assert "no length beyond the 64" not in out


def test_a_model_that_recalls_nothing_is_told_so(tmp_path: Path, capsys) -> None:
    run(tiny("lfm2"), tmp_path / "a", probe(), max_steps=1)
    assert capsys.readouterr().out.count("nothing was recalled at the first measurement") == 1
    run(load_model(), tmp_path / "b", probe(lengths=(128,)), max_steps=1)
    assert "nothing was recalled" not in capsys.readouterr().out


def test_a_resumed_run_keeps_its_first_measurement(tmp_path: Path, capsys) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    run(tiny("lfm2"), tmp_path, probe(), max_steps=4, **saving)
    record = tmp_path / "routeguard" / "recall.jsonl"
    whole = read_recall(record)
    record.write_text(record.read_text() + '{"step": 4, "half')
    resumed = probe(max_drop=0.5)
    run(tiny("lfm2"), tmp_path, resumed, max_steps=4, resume=str(tmp_path / "checkpoint-2"), **saving)
    assert sorted(resumed.results) == [2, 3, 4]
    assert "3 measurements" in (out := capsys.readouterr().out) and out.count("recall from step 0 to 4") == 2
    again = read_recall(record)
    assert sorted(again) == [0, 1, 2, 3, 4]
    assert [s.nll for s in again[4].scores] == [s.nll for s in whole[4].scores]
    assert resumed._first == {40: whole[0].accuracy(length=40), 56: whole[0].accuracy(length=56)}
    run(tiny("lfm2"), tmp_path, probe(), max_steps=1)
    assert (tmp_path / "routeguard" / "recall.1.jsonl").is_file()  # another run's is kept
    damaged = record.read_text().splitlines()
    record.write_text("\n".join([json.dumps({"schema_version": 7}), *damaged[1:]]))
    with pytest.raises(ValueError, match="schema version 7"):
        read_recall(record)


def test_a_resumed_run_that_asks_otherwise_says_so(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    again = {**saving, "resume": str(tmp_path / "checkpoint-2")}
    run(tiny("lfm2"), tmp_path, probe(), **saving)
    record = tmp_path / "routeguard" / "recall.jsonl"
    written = record.read_text()
    with pytest.raises(ValueError, match=r"lengths was \[40, 56\] and is \[40\].*; give the settings of then, leave"):
        run(tiny("lfm2"), tmp_path, probe(lengths=(40,), max_drop=0.5), **again)
    assert record.read_text() == written and not record.with_name("recall.1.jsonl").exists()
    message = r"seed was 0 and is 4.*its record is kept as .*recall\.1\.jsonl; drops are now counted from .*, at step 2"
    insisting = probe(seed=4, max_drop=0.5, insist=True)
    with pytest.warns(UserWarning, match=message):
        run(tiny("lfm2"), tmp_path, insisting, **again)
    assert sorted(insisting.results) == [2, 3, 4] and record.with_name("recall.1.jsonl").read_text() == written
    with pytest.warns(UserWarning, match="num_samples was 2 and is 1"):
        run(tiny("lfm2"), tmp_path, probe(seed=4, num_samples=1), **again)
    record.unlink()
    with pytest.warns(UserWarning, match=r"has no measurement in .*recall\.jsonl; drops are now counted"):
        run(tiny("lfm2"), tmp_path, probe(max_drop=0.5), **again)
    with warnings.catch_warnings():  # the same settings: nothing to say
        warnings.filterwarnings("error", message=".*is resumed")
        run(tiny("lfm2"), tmp_path, probe(max_drop=0.5), **again)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every=0 steps"),
        ({"share": 0}, "share=0 of the training time"),
        ({"action": "shout"}, "no action 'shout'"),
        ({"action": "stop"}, "action='stop' without max_drop never stops"),
        ({"max_drop": 10}, "give 0.1 for ten points"),
        ({"tasks": "niah"}, "no recall task"),
        ({"lengths": ()}, "give lengths of at least 1 token"),
        ({"lengths": 4096}, "lengths=4096: give a sequence"),
        ({"lengths": (4096.5,)}, "length 4096.5 is not a whole number"),
        ({"lengths": (512.0,)}, "length 512.0 is not a whole number"),
        ({"lengths": "4k"}, "lengths='4k': give a sequence"),
        ({"batch_tokens": 0}, "batch_tokens=0: give a whole number"),
        ({"num_samples": 0}, "num_samples=0: give a whole number"),
    ],
)
def test_settings_that_make_no_sense(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (40, 100)}, "length 100 is beyond the model's 64 positions"),
        ({"lengths": (20,)}, "too short for demo_needles"),
        ({"tokenizer": None}, "needs a tokenizer"),
    ],
)
def test_refusals_before_the_first_step(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny("lfm2"), tmp_path, probe(**changes))


def test_attached_later(tmp_path: Path) -> None:
    trainer = make(tiny("lfm2"), tmp_path)
    watched = probe().attach(trainer)
    assert watched.attach(trainer) is watched
    trainer.train()
    assert sorted(watched.results) == [0, 1, 2, 3, 4]
    assert sum("recall/@40" in line for line in trainer.state.log_history) == 5


@pytest.mark.parametrize(("flag", "engine"), [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")])
def test_sharding_engines_are_refused(flag: str, engine: str) -> None:
    probing = probe()
    plugin = SimpleNamespace(fsdp_version=1)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    probing._trainer = SimpleNamespace(**{flag: True}, accelerator=accelerator)
    with pytest.raises(ValueError, match=f"not supported under {engine}"):
        probing.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(is_world_process_zero=True), None)


def test_stopping_with_several_processes_is_refused() -> None:
    probing = probe(action="stop", max_drop=0.2)
    with pytest.raises(ValueError, match="not supported with several processes"):
        probing.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(is_world_process_zero=True), None)
