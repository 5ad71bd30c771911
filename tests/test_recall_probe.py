"""RecallProbe: the run stays the same bit for bit, what it logs, its threshold, resuming, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, TrainerCallback

from routeguard import QKRestore, RecallProbe, RouteGuard, measure_recall, read_recall
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.recall.quiet import undisturbed
from tests.loops import assert_same, tiny
from tests.trainers import dataset, make, parameters, run
from tests.zoo.build import build
from tests.zoo.case import text

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


@pytest.mark.parametrize("case", ["gpt2", "lfm2", "granitemoehybrid"])
def test_a_probed_run_is_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    plain = run(tiny(case), tmp_path / "a")
    probed = run(tiny(case), tmp_path / "b", probe())
    assert_same(parameters(plain), parameters(probed))
    assert losses(plain) == losses(probed) and len(losses(plain)) == 2  # no log line is lost either


def test_dropout_would_be_disturbed_without_care(tmp_path: Path) -> None:
    """The control: a callback that merely runs the model in training mode changes the run."""

    class Careless(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model(input_ids=torch.randint(10, 80, (2, 40)))

    plain, careless = run(tiny("gpt2"), tmp_path / "a"), run(tiny("gpt2"), tmp_path / "b", Careless())
    assert losses(plain) != losses(careless)


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}])
def test_under_mixed_precision_checkpointing_and_adapters(options: dict, tmp_path: Path) -> None:
    def adapted():
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
        model = get_peft_model(tiny("llama"), config)
        model.enable_input_require_grads()
        return model

    plain = run(adapted(), tmp_path / "a", sft=True, **options)
    watched = probe()
    probed = run(adapted(), tmp_path / "b", watched, sft=True, **options)
    assert_same(parameters(plain), parameters(probed))
    assert losses(plain) == losses(probed)
    accuracies = ([line for line in t.state.log_history if "mean_token_accuracy" in line] for t in (plain, probed))
    first, second = ([line["mean_token_accuracy"] for line in lines] for lines in accuracies)
    assert first == second  # TRL's running averages are not emptied by the probe
    assert sorted(watched.results) == [0, 1, 2, 3, 4]


def test_a_rotary_embedding_that_adapts_to_length_is_put_back() -> None:
    case = text("llama/dynamic", max_position_embeddings=16,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})  # fmt: skip
    model = build(case)
    rotary = model.model.rotary_emb
    before = rotary.inv_freq.clone(), {k: v for k, v in vars(rotary).items() if isinstance(v, (int, float))}
    ids = torch.randint(10, 80, (1, 56))
    with undisturbed(model):
        model(input_ids=ids)
        assert not torch.equal(rotary.inv_freq, before[0])  # the control: it did adapt
    assert torch.equal(rotary.inv_freq, before[0])
    assert before[1] == {k: v for k, v in vars(rotary).items() if isinstance(v, (int, float))}


def test_dynamic_rotary_scaling_with_rows_of_different_lengths(tmp_path: Path) -> None:
    """From its first growth on, the longest length seen is a plain tensor on the rotary module."""

    def model():
        return build(
            text(
                "llama/dynamic",
                max_position_embeddings=16,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
            )
        ).train()

    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(10, 80, (n,), generator=generator).tolist() for n in [18, 20, 22, 24, 26, 28, 30, 32] * 2]
    rows = {"train_dataset": Dataset.from_dict({"input_ids": ids, "labels": ids})}
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 8, "seed": 4}
    plain = run(model(), tmp_path / "a", trainer_options=rows, **options)
    probed = run(model(), tmp_path / "b", probe(insist=True), trainer_options=rows, **options)
    assert isinstance(plain.model.model.rotary_emb.max_seq_len_cached, torch.Tensor)  # it did grow
    assert int(probed.model.model.rotary_emb.max_seq_len_cached) <= 32  # not the probe's 56
    assert losses(plain) == losses(probed)
    assert_same(parameters(plain), parameters(probed))


def test_what_a_forward_pass_leaves_on_a_module_is_taken_away() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.tensor(3)
            self.register_buffer("table", torch.ones(2))

        def forward(self) -> None:
            self.seen += 1  # in place
            self.cache, self.count = torch.ones(4), 1
            self.table = torch.zeros(5)
            self.register_buffer("more", torch.ones(1))

    module = Module()
    with undisturbed(module):
        module()
    assert int(module.seen) == 3 and torch.equal(module.table, torch.ones(2))
    assert not {"cache", "count", "more"} & {*vars(module), *module._buffers}


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


class Reporter(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen += [f"{state.global_step}:{name}" for name in logs if name.startswith("recall")]


def test_inside_a_guard_with_a_restore_at_the_end(tmp_path: Path, capsys) -> None:
    watched, reporter = probe(every=None, share=1e-9), Reporter()
    guard = RouteGuard("track", restore=QKRestore(), probe=watched)
    trainer = run(tiny("lfm2"), tmp_path, guard, reporter)
    assert sorted(watched.results) == [0, 4]  # the time allows nothing in between
    assert watched.restored is not None
    again = measure_recall(trainer.model, load_tokenizer(), tasks="demo_needles", lengths=(40, 56), num_samples=2)
    nats = [s.nll for s in watched.restored.scores]
    assert [s.nll for s in again.scores] == pytest.approx(nats, rel=1e-3)
    assert nats != [s.nll for s in watched.results[4].scores]
    assert [name for name in reporter.seen if "@56" in name] == [
        "0:recall/@56",
        "4:recall/@56",
        "4:recall_restored/@56",
    ]
    assert read_recall(tmp_path / "routeguard" / "recall.jsonl", restored=True)[4] == watched.restored
    assert "recall probe: demo_needles at [40, 56] tokens" in capsys.readouterr().out
    guard.detach()
    assert not any(isinstance(c, (RouteGuard, RecallProbe)) for c in trainer.callback_handler.callbacks)


class Stop(TrainerCallback):
    """Decides to stop after step 3, in an event that comes after the probe's own."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **kwargs):
        if state.global_step == 3:
            control.should_training_stop = True


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_epoch_end"])
def test_a_stop_that_is_decided_late_is_measured_too(event: str, tmp_path: Path) -> None:
    watched = probe(every=None, share=1e-9)
    rows = {"train_dataset": dataset(rows=12)}  # three steps an epoch
    trainer = run(tiny("lfm2"), tmp_path, watched, Stop(event), max_steps=8, logging_steps=1, trainer_options=rows)
    assert trainer.state.global_step == 3 and sorted(watched.results) == [0, 3]
    again = measure_recall(trainer.model, load_tokenizer(), tasks="demo_needles", lengths=(40, 56), num_samples=2)
    assert [s.nll for s in again.scores] == pytest.approx([s.nll for s in watched.results[3].scores], rel=1e-3)


def test_early_stopping_is_measured_before_the_guard_restores(tmp_path: Path) -> None:
    watched = probe(every=None, share=1e-9)
    guard = RouteGuard("track", restore=QKRestore(), probe=watched)
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    rows = {"train_dataset": dataset(rows=8), "eval_dataset": dataset(rows=4)}  # two steps an epoch
    stopping = EarlyStoppingCallback(1, early_stopping_threshold=1e9)
    trainer = run(tiny("lfm2"), tmp_path, guard, stopping, max_steps=20, trainer_options=rows, **options)
    assert trainer.state.global_step == 4 and sorted(watched.results) == [0, 4]
    restored, before = ([s.nll for s in result.scores] for result in (watched.restored, watched.results[4]))
    assert restored != before
    again = measure_recall(trainer.model, load_tokenizer(), tasks="demo_needles", lengths=(40, 56), num_samples=2)
    assert [s.nll for s in again.scores] == pytest.approx(restored, rel=1e-3)
    guard.detach()
    assert not any("recall" in type(c).__module__ for c in trainer.callback_handler.callbacks)


def test_a_guarded_probed_run_is_the_guarded_run(tmp_path: Path) -> None:
    guarded = run(tiny("lfm2"), tmp_path / "a", RouteGuard("track"))
    probed = run(tiny("lfm2"), tmp_path / "b", RouteGuard("track", probe=probe()))
    assert_same(parameters(guarded), parameters(probed))
    drift = ([line for line in t.state.log_history if "routeguard/drift_max" in line] for t in (guarded, probed))
    first, second = ([line["routeguard/drift_max"] for line in lines] for lines in drift)
    assert first == second and len(first) == 2


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


def test_a_resumed_run_keeps_its_first_measurement(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    run(tiny("lfm2"), tmp_path, probe(), max_steps=4, **saving)
    record = tmp_path / "routeguard" / "recall.jsonl"
    whole = read_recall(record)
    record.write_text(record.read_text() + '{"step": 4, "half')
    resumed = probe(max_drop=0.5)
    run(tiny("lfm2"), tmp_path, resumed, max_steps=4, resume=str(tmp_path / "checkpoint-2"), **saving)
    assert sorted(resumed.results) == [2, 3, 4]
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every=0 steps"),
        ({"share": 0}, "share=0 of the training time"),
        ({"action": "shout"}, "no action 'shout'"),
        ({"max_drop": 10}, "give 0.1 for ten points"),
        ({"tasks": "niah"}, "no recall task"),
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
    probing._trainer = SimpleNamespace(**{flag: True})
    with pytest.raises(ValueError, match=f"not supported under {engine}"):
        probing.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(is_world_process_zero=True), None)


def test_stopping_with_several_processes_is_refused() -> None:
    probing = probe(action="stop", max_drop=0.2)
    with pytest.raises(ValueError, match="not supported with several processes"):
        probing.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(is_world_process_zero=True), None)
