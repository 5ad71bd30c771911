"""The lab's fine-tuning: its data, its mechanisms, and that each condition's mechanism shows in a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.conditions import sets
from benchmarks.lab.conditions.repair import Repair, repaired
from benchmarks.lab.conditions.table import CONDITIONS, by_run, find_conditions
from benchmarks.lab.language.needles import DEVELOPMENT, NEEDLE_KINDS, TESTED
from benchmarks.lab.language.words import VOCABULARY, build_tokenizer
from benchmarks.lab.measuring.drift import drift
from benchmarks.lab.models.architectures import ARCHITECTURES
from benchmarks.lab.training.data import DATA_KINDS, as_dataset, samples_for
from benchmarks.lab.training.fine_tune import fine_tune
from benchmarks.lab.training.mechanisms import scaled_steps, within_radius
from benchmarks.lab.training.plan import Training
from routeguard.protect.modes import L2SP, Anchor, Freeze, LowLR, QKRestore
from routeguard.routes.find import find_routes

SUMS = DATA_KINDS["sums"]
STEPS = 4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


def tuned_and_start(
    training: Training, tokenizer: PreTrainedTokenizerBase, folder: Path, architecture: str = "lfm2", steps: int = STEPS
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    model = ARCHITECTURES[architecture].untrained(0)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tuned = fine_tune(model, tokenizer, training, SUMS, seed=0, steps=steps, learning_rate=2e-3, output_dir=folder)
    return tuned.model, start


def drift_after(
    training: Training, tokenizer: PreTrainedTokenizerBase, folder: Path, **kwargs: object
) -> dict[str, float]:
    model, start = tuned_and_start(training, tokenizer, folder, **kwargs)  # type: ignore[arg-type]
    return drift(model, start)


# -- data ----------------------------------------------------------------------------------------------------------


def test_replay_replaces_the_share_asked_for_and_nothing_else() -> None:
    def samples(replay: float) -> list[str]:
        made = samples_for(SUMS, num_samples=200, num_words=95, seed=3, replay=replay, replayed=Training().replayed)
        return [sample.text for sample in made]

    plain, mixed = samples(0.0), samples(0.05)
    replaced = [new for old, new in zip(plain, mixed, strict=True) if old != new]
    assert len(plain) == len(mixed) == 200 and len(replaced) == 10
    for name in Training().replayed:
        assert (
            sum(text.startswith(NEEDLE_KINDS[name].tell) or f" {NEEDLE_KINDS[name].tell} " in text for text in replaced)
            == 5
        )
    forbidden = {TESTED.ask, DEVELOPMENT.ask, *TESTED.keys, *DEVELOPMENT.keys}
    assert not forbidden & {word for text in replaced for word in text.split()}
    with pytest.raises(ValueError, match="no sample at all"):
        samples(0.001)


def test_only_a_condition_named_so_replays_the_tested_kind() -> None:
    for name, condition in CONDITIONS.items():
        replayed = set(condition.training.replayed) if condition.training.replay else set()
        assert DEVELOPMENT.name not in replayed
        assert (TESTED.name in replayed) == ("tested_kind" in name), name


def test_labels_are_the_words_that_count(tokenizer: PreTrainedTokenizerBase) -> None:
    made = samples_for(SUMS, num_samples=8, num_words=95, seed=3, replay=0.25, replayed=("letters",))
    dataset = as_dataset(made, tokenizer)
    for row, sample in zip(dataset, made, strict=True):
        labels = [VOCABULARY[label] if label >= 0 else None for label in row["labels"][1:]]
        assert labels == [word if counts else None for word, counts in zip(sample.words, sample.in_loss, strict=True)]


def test_longer_texts_are_fewer_a_step(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = ARCHITECTURES["lfm2"].untrained(0)
    training = CONDITIONS["long_texts"].training
    run = fine_tune(model, tokenizer, training, SUMS, seed=0, steps=2, learning_rate=1e-3, output_dir=tmp_path)
    assert (run.batch_size, run.steps) == (8, 2)


# -- mechanisms ----------------------------------------------------------------------------------------------------


def test_the_mechanisms_are_what_they_say() -> None:
    start, now = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 6.0])
    assert scaled_steps([start], [now], 3.0)[0].tolist() == [3.0, 10.0]
    assert within_radius([now], [start], 0.2)[0].tolist() == [3.0, 5.0]
    assert within_radius([now], [start], 0.5)[0].tolist() == now.tolist()
    assert within_radius([start], [start], 0.1)[0].tolist() == start.tolist()


@pytest.mark.parametrize("architecture", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_each_mechanism_shows_in_a_run(architecture: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Qwen3-Next has query rows inside a gated projection, so there the mechanisms act on rows."""

    def routing(**settings: object) -> dict[str, float]:
        return drift_after(Training(**settings), tokenizer, tmp_path, architecture=architecture)  # type: ignore[arg-type]

    plain = routing()
    assert plain["routing"] > 0.01
    assert routing(protect=Freeze())["routing"] == 0
    assert 0 < routing(protect=LowLR(0.1))["routing"] < 0.3 * plain["routing"]
    assert 0 < routing(protect=Anchor(300.0))["routing"] < plain["routing"]
    assert routing(trust_radius=0.005)["routing"] == pytest.approx(0.005, rel=1e-4)
    assert routing(trust_radius=1.0) == plain
    settled = routing(settle_at=0.5)
    assert settled["routing"] == 0 and settled["all"] > 0.5 * plain["all"]
    assert routing(routing_rate=3.0)["routing"] > 2 * plain["routing"]
    assert 0 < routing(protect=L2SP(2.0))["all"] < 0.8 * plain["all"]


def test_settle_lets_routing_move_first(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """With the share just above what is left, queries and keys are still where training has put them."""
    assert drift_after(Training(settle_at=1.01), tokenizer, tmp_path)["routing"] > 0
    frozen, start = tuned_and_start(Training(protect=Freeze()), tokenizer, tmp_path)
    settled, _ = tuned_and_start(Training(settle_at=0.75), tokenizer, tmp_path)
    other = "model.layers.0.feed_forward.w1.weight"
    assert not torch.equal(dict(frozen.named_parameters())[other], dict(settled.named_parameters())[other])
    assert set(start) == set(dict(settled.named_parameters()))


def test_a_rate_of_three_is_what_an_optimizer_group_would_do(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """One step: the same gradients, so queries and keys move three times as far and the rest exactly as far."""
    plain, start = tuned_and_start(Training(), tokenizer, tmp_path, steps=1)
    fast, _ = tuned_and_start(Training(routing_rate=3.0), tokenizer, tmp_path, steps=1)
    routed = {route.parameter for route in find_routes(plain)}
    moved = dict(fast.named_parameters())
    for name, parameter in plain.named_parameters():
        scale = 3.0 if name in routed else 1.0
        torch.testing.assert_close(moved[name], start[name] + scale * (parameter - start[name]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "architecture", ["lfm2", *(pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES if n != "lfm2")]
)
def test_lora_is_merged_and_may_leave_routing_alone(
    architecture: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    both = drift_after(Training(lora="all", rate=4.0), tokenizer, tmp_path, architecture=architecture, steps=3)
    without = drift_after(
        Training(lora="without_qk", rate=4.0), tokenizer, tmp_path, architecture=architecture, steps=3
    )
    assert both["routing"] > 0 and without["routing"] == 0 and without["all"] > 0


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        Training(protect=Freeze(), trust_radius=0.1)
    with pytest.raises(ValueError, match="with LoRA"):
        Training(lora="all", settle_at=0.5)


# -- repairs -------------------------------------------------------------------------------------------------------


def test_repairs_do_what_they_say_and_are_undone(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model, start = tuned_and_start(Training(), tokenizer, tmp_path)
    before = drift(model, start)
    with repaired(model, start, CONDITIONS["qk_restore"].repair):
        assert drift(model, start)["routing"] == 0
    with repaired(model, start, CONDITIONS["q_restore"].repair):
        found = drift(model, start)
        assert found["query"] == 0 and found["key"] == before["key"]
    with repaired(model, start, CONDITIONS["wise_ft_0.25"].repair):
        assert drift(model, start)["all"] == pytest.approx(0.75 * before["all"], rel=1e-3)
    with repaired(model, start, CONDITIONS["wise_ft_0.25+restore"].repair):
        assert drift(model, start)["routing"] == 0
    some = Repair(QKRestore(), heads=2)
    with repaired(model, start, some, heads={2: {2: (0, 1)}}):
        assert 0 < drift(model, start)["routing"] < before["routing"]
    with pytest.raises(ValueError, match="2 heads are to be restored"), repaired(model, start, some):
        pass
    assert drift(model, start) == before


# -- the table -----------------------------------------------------------------------------------------------------


def test_conditions_are_distinct_and_share_runs() -> None:
    settings = [repr(condition.settings()) for condition in CONDITIONS.values()]
    assert len(set(settings)) == len(settings)
    runs = by_run(list(CONDITIONS.values()))
    assert len(runs) < len(CONDITIONS) / 2
    assert {"none", "qk_restore", "v_restore", "heads_2_restore"} <= {c.name for c in runs[Training()]}
    for names in (sets.ELSEWHERE, sets.CONFIRMED, sets.CONFIRMED_ELSEWHERE, sets.QUICK):
        assert {"none", "qk_restore"} <= set(names) <= set(CONDITIONS)


def test_conditions_are_found_by_name_and_beginning() -> None:
    assert [c.name for c in find_conditions(["freeze", "settle_0.8"])] == ["freeze", "settle_0.8"]
    assert {c.name for c in find_conditions(["q_*"])} == {"q_restore"}
    with pytest.raises(ValueError, match="no condition 'freze'; closest freeze"):
        find_conditions(["freze"])
