"""Losses against whole matrices, the teacher's text, and real StateTransitionTrainer runs on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from torch import Tensor
from torch.nn import functional
from transformers import set_seed

from routeguard import RecallProbe, RouteGuard, Track, measure_recall
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.state_transition.convert import StateTransition, add_state_transition
from routeguard.state_transition.losses import StepLosses, decoder_output, step_losses
from routeguard.state_transition.teacher import teacher_rows
from routeguard.state_transition.trainer import StateTransitionTrainer
from tests import state_transition_worker as worker
from tests.engines import distributed
from tests.loops import tiny
from tests.state_transition_texts import END, OTHER, START, TWO_TEXTS, config, converted, layout_of, text
from tests.test_state_transition_paths import PACKED, POSITIONS
from tests.trainers import sft_arguments, tokenizer
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")
STEP_TOKENS = (START, OTHER, END)


def test_the_teacher_reads_the_text_without_step_tokens() -> None:
    mask = torch.ones_like(PACKED)
    mask[1, -4:] = 0
    layout = layout_of(PACKED, position_ids=POSITIONS, attention_mask=mask)
    rows = teacher_rows(PACKED, layout, STEP_TOKENS)
    samples = [PACKED[0, :20], PACKED[0, 20:], PACKED[1, :15], PACKED[1, 15:-4]]
    for number, sample in enumerate(samples):
        kept = [token for token in sample.tolist() if token not in STEP_TOKENS]
        assert rows.input_ids[number, : len(kept)].tolist() == kept
        assert rows.attention_mask[number].tolist() == [1] * len(kept) + [0] * (rows.input_ids.shape[1] - len(kept))
    for row in range(2):
        for i in range(PACKED.shape[1]):
            if mask[row, i] and PACKED[row, i] not in STEP_TOKENS:
                assert rows.input_ids[rows.row[row, i], rows.place[row, i]] == PACKED[row, i]
    # After a step token the teacher stands where it stood before.
    assert rows.place[0, 3] == rows.place[0, 2] == 2 and rows.place[0, 4] == 3
    starts_with_one = teacher_rows(text("(", 3)[None], layout_of(text("(", 3)), STEP_TOKENS)
    assert starts_with_one.row[0].tolist() == [-1, 0, 0, 0]


def losses_of(transition: StateTransition, ids: Tensor, labels: Tensor, options: dict[str, Any], **more) -> StepLosses:
    with decoder_output(transition) as found:
        transition.model(input_ids=ids, use_cache=False, logits_to_keep=1, **options)
    assert transition.running is not None
    return step_losses(transition, found[0], ids, labels, transition.running.layout, **more)


def whole_losses(transition: StateTransition, ids: Tensor, labels: Tensor, options: dict[str, Any]):
    """Both sums with all logits at once, and the teacher asked sample by sample."""
    logits = transition.model(input_ids=ids, use_cache=False, **options).logits.float()
    layout = transition.running.layout
    next_token = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    distance, compared = logits.sum() * 0, 0
    for row in range(len(ids)):
        for sample in range(int(layout.sample[row].max()) + 1):
            places = [i for i in range(ids.shape[1]) if layout.sample[row, i] == sample and layout.kind[row, i] >= 0]
            plain = [i for i in places if int(ids[row, i]) not in STEP_TOKENS]
            with torch.no_grad(), transition.disabled():
                base = transition.model(ids[row, plain][None], use_cache=False).logits[0].float()
            for number, i in enumerate(plain[1:], 1):
                if labels[row, i] != -100:
                    theirs = torch.log_softmax(base[number - 1], -1)
                    ours = torch.log_softmax(logits[row, i - 1, : len(theirs)], -1)
                    distance = distance + (theirs.exp() * (theirs - ours)).sum()
                    compared += 1
    return next_token, distance, compared


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
@pytest.mark.parametrize("loss_tokens", [5, 1000])
def test_the_losses_are_those_of_whole_matrices(name: str, loss_tokens: int) -> None:
    transition = converted(name)
    labels = TWO_TEXTS.clone()
    labels[:, :9] = -100
    labels[0, 20:23] = -100
    found = losses_of(transition, TWO_TEXTS, labels, {}, loss_tokens=loss_tokens)
    wanted = whole_losses(transition, TWO_TEXTS, labels, {})
    assert found.num_tokens == int((labels[:, 1:] != -100).sum()) and found.num_compared == wanted[2] < found.num_tokens
    torch.testing.assert_close(found.next_token, wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.distance, wanted[1], rtol=1e-3, atol=1e-4)
    assert float(wanted[1]) > 0.1
    trained = [p for _, p in transition.named_parameters()]
    ours = torch.autograd.grad(found.next_token + 0.7 * found.distance, trained, allow_unused=True)
    theirs = torch.autograd.grad(wanted[0] + 0.7 * wanted[1], trained, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)


def test_packed_samples_have_teachers_of_their_own() -> None:
    transition = converted("llama")
    labels = PACKED.clone()
    labels[0, 20] = labels[1, 15] = -100  # nothing is predicted across samples
    options = {"position_ids": POSITIONS}
    found = losses_of(transition, PACKED, labels, options)
    wanted = whole_losses(transition, PACKED, labels, options)
    torch.testing.assert_close(found.distance, wanted[1], rtol=1e-3, atol=1e-4)
    assert found.num_compared == wanted[2]


def test_a_fresh_model_is_at_no_distance_where_it_sees_the_same() -> None:
    transition = add_state_transition(build("llama"), config())
    one = text(30)[None]
    losses = losses_of(transition, one, one, {})
    assert float(losses.distance) == pytest.approx(0, abs=1e-5) and losses.num_compared == 29
    several = losses_of(transition, TWO_TEXTS, TWO_TEXTS, {})  # here it has lost the earlier steps
    assert float(several.distance) > 1e-3
    assert losses_of(transition, TWO_TEXTS, TWO_TEXTS, {}, compare=False).num_compared == 0


def test_few_logits_are_held_at_a_time() -> None:
    transition = converted("llama")
    rows: list[int] = []
    handle = transition.model.lm_head.register_forward_hook(lambda m, a, out: rows.append(out.shape[:-1].numel()))
    losses = losses_of(transition, TWO_TEXTS, TWO_TEXTS, {}, loss_tokens=16)
    (losses.next_token + losses.distance).backward()
    handle.remove()
    assert max(rows) == 16 and sum(rows) > 2 * 78  # ours, again in the backward pass, and the base model's


def data(rows: int = 24) -> Dataset:
    """Chains whose last step repeats a token of the first one."""
    ids = []
    for row in range(rows):
        ids.append(text(4, "(", 3, ")", "[", 5, ")", "(", 3, ")", 2, seed=row).tolist())
        ids[-1][-2] = ids[-1][5]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trained(output: Path, transition: StateTransition | None = None, *, resume: str | None = None, **changes: Any):
    options = {"beta": changes.pop("beta", 0.5), "train_dataset": changes.pop("train_dataset", data())}
    set_seed(3)
    if transition is None:
        transition = add_state_transition(tiny("llama"), config())
    trainer = StateTransitionTrainer(
        transition.model,
        args=sft_arguments(output, **{"learning_rate": 5e-2, "logging_steps": 1, "weight_decay": 0.0, **changes}),
        processing_class=tokenizer(),
        loss_tokens=32,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(transition: StateTransition) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in transition.named_parameters()}


def test_a_run_trains_the_paths_and_leaves_the_base(tmp_path: Path) -> None:
    transition = add_state_transition(tiny("llama"), config())
    before = weights(transition)
    trainer = trained(tmp_path, transition, max_steps=12)
    lines = [line for line in trainer.state.log_history if "step/next_token_loss" in line]
    assert len(lines) == 12 and lines[-1]["step/next_token_loss"] < 0.9 * lines[0]["step/next_token_loss"]
    for line in lines:
        wanted = line["step/next_token_loss"] + 0.5 * line["step/distance"] * 16 / 22  # 6 of 22 labels are step tokens
        assert line["loss"] == pytest.approx(wanted, rel=0.02)
        assert line["step/steps"] == 3 and line["step/alpha"] == 0.4 and line["step/state_norm"] > 0
    assert lines[0]["step/gate"] == 0.5 != lines[-1]["step/gate"]
    after = weights(transition)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    base = build("llama").state_dict()
    transition.remove()
    assert all(torch.equal(value, base[name]) for name, value in transition.model.state_dict().items())


def test_checkpoints_hold_the_paths_alone_and_resume(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path / "a", **saving)
    folder = tmp_path / "a" / "checkpoint-2"
    assert (folder / "state_transition.safetensors").is_file() and not (folder / "model.safetensors").exists()
    again = trained(tmp_path / "b", resume=str(folder), **saving)
    wanted = weights(whole.transition)
    assert again.state.global_step == 4
    for name, value in weights(again.transition).items():
        assert torch.equal(value, wanted[name]), name
    whole.save_model(str(tmp_path / "c"))
    loaded = StateTransition.from_pretrained(build("llama"), tmp_path / "c")
    assert all(torch.equal(value, wanted[name]) for name, value in weights(loaded).items())
    other = add_state_transition(build("llama"), config(max_alpha=0.1))
    with pytest.raises(ValueError, match="was written with other settings"):
        other.load(folder)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain, spared = (
        trained(tmp_path / name, gradient_checkpointing=on, max_steps=3) for name, on in (("a", False), ("b", True))
    )
    wanted = weights(plain.transition)
    for name, value in weights(spared.transition).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def test_bf16_autocast_and_a_16_bit_base(tmp_path: Path) -> None:
    transition = add_state_transition(tiny("llama", dtype=torch.bfloat16), config())
    trainer = trained(tmp_path, transition, bf16=True, max_steps=6)
    lines = [line["step/next_token_loss"] for line in trainer.state.log_history if "step/next_token_loss" in line]
    assert lines[-1] < lines[0]
    assert {p.dtype for _, p in transition.named_parameters()} == {torch.float32}


def test_accumulation_weighs_tokens_not_batches(tmp_path: Path) -> None:
    """Two batches of one row with accumulation are one batch of two, whatever their labels."""
    rows = data(8)
    uneven = [[-100] * (17 * (i % 2)) + row[17 * (i % 2) :] for i, row in enumerate(rows["input_ids"])]
    rows = Dataset.from_dict({"input_ids": rows["input_ids"], "labels": uneven})
    options = {"train_dataset": rows, "max_steps": 1, "beta": 0.0, "learning_rate": 1e-3, "max_grad_norm": 0.0}
    losses = [
        trained(
            tmp_path / str(size), per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, **options
        ).state.log_history[0]["loss"]
        for size in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_the_trainer_refuses(tmp_path: Path) -> None:
    arguments = sft_arguments(tmp_path)
    with pytest.raises(ValueError, match="has no state transition; convert it first"):
        StateTransitionTrainer(tiny("llama"), args=arguments, train_dataset=data())
    model = converted("llama").model
    for options, message in (
        ({"beta": -1.0}, "beta must not be negative"),
        ({"loss_tokens": 0}, "loss_tokens at least 1"),
        ({"peft_config": LoraConfig()}, r"leave out \['peft_config'\]"),
        ({"compute_loss_func": print}, r"leave out \['compute_loss_func'\]"),
        ({"compute_metrics": print}, r"leave out \['compute_metrics'\]"),
        ({"args": sft_arguments(tmp_path, label_smoothing_factor=0.1)}, "does not support label_smoothing_factor=0.1"),
        ({"args": sft_arguments(tmp_path, loss_type="dft")}, "does not support loss_type='dft'"),
        (
            {"args": sft_arguments(tmp_path, packing=True, packing_strategy="wrapped", max_length=64)},
            "does not support packing_strategy='wrapped'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            StateTransitionTrainer(
                model, **{"args": arguments, "train_dataset": data(), "processing_class": tokenizer(), **options}
            )


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """DDP, with and without gradient checkpointing; in the first step one process sees no step at all."""
    done = distributed("tests.state_transition_worker", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    one = weights(worker.trained(tmp_path / "one", per_device_train_batch_size=4).transition)
    for name in ("plain", "spared"):
        first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in (0, 1))
        for key, value in one.items():
            assert torch.equal(first[key], second[key])
            torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-6)
    saved = StateTransition.from_pretrained(build("llama"), tmp_path / "plain-saved")
    assert all(torch.equal(value, torch.load(tmp_path / "plain.0.pt")[key]) for key, value in weights(saved).items())


def test_rows_cut_in_a_step_are_warned_about(tmp_path: Path) -> None:
    cut = Dataset.from_dict({"input_ids": [text(4, "(", 7).tolist(), text(4, "(", 3, ")", 3).tolist()] * 4})
    cut = cut.add_column("labels", cut["input_ids"])
    model = converted("llama").model
    with pytest.warns(UserWarning, match="4 of the first 8 rows are cut at max_length=12 in the middle of a step"):
        StateTransitionTrainer(
            model, args=sft_arguments(tmp_path, max_length=12), train_dataset=cut, processing_class=tokenizer()
        )


def test_paths_are_watched_while_they_train_only(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=1)
    assert not any(path.watched for path in trainer.transition.paths.values())


def test_data_without_steps_is_refused(tmp_path: Path) -> None:
    plain = Dataset.from_dict({"input_ids": [text(9).tolist()] * 4, "labels": [text(9).tolist()] * 4})
    options = {"args": sft_arguments(tmp_path), "processing_class": tokenizer()}
    model = converted("llama").model
    with pytest.raises(ValueError, match=r"none of the first 4 rows holds a start token \(96, 97\)"):
        StateTransitionTrainer(model, train_dataset=plain, **options)
    many = concatenate_datasets([plain] * 65)
    with pytest.warns(UserWarning, match="none of the first 256 rows holds a start token"):
        StateTransitionTrainer(model, train_dataset=many, **options)


def test_a_guarded_run_has_no_drift_and_its_recall_is_probed(tmp_path: Path) -> None:
    """RouteGuard beside the trainer: drift of exactly 0 in every line, recall before and after, the base's at first."""
    model = load_model()
    base = measure_recall(model, load_tokenizer(), tasks="demo_needles", lengths=(128,), num_samples=4)
    add_state_transition(model, config(start_token_ids=(83,), end_token_id=84))
    ids = [[*text(8, seed=row).tolist(), 83, 20, 21, 22, 84, 83, 23, 24, 84] for row in range(8)]
    probe = RecallProbe(lengths=(128,), tasks="demo_needles", num_samples=4)
    trainer = StateTransitionTrainer(
        model,
        args=sft_arguments(tmp_path, max_steps=3, learning_rate=1e-2, logging_steps=1),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=load_tokenizer(),
        callbacks=[RouteGuard(protect=Track(), probe=probe)],
    )
    trainer.train()
    drifts = [value for line in trainer.state.log_history for name, value in line.items() if "drift" in name]
    assert drifts and set(drifts) == {0.0}
    recalled = [line["recall/@128"] for line in trainer.state.log_history if "recall/@128" in line]
    assert len(recalled) >= 2 and recalled[0] == recalled[-1] == base.accuracy() == 1.0
    moved = [p.detach().abs().max() > 0 for name, p in trainer.transition.named_parameters() if "multiplier" in name]
    assert moved and all(moved)  # the run did train the paths
