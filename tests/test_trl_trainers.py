"""RouteGuard in TRL's DPO and GRPO trainers: reasoning training goes on there after supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from routeguard import Anchor, LowLR, QKRestore, RouteGuard, Track, find_routes
from routeguard.protect.held import lora_pairs
from routeguard.protect.rows import clear_rows, take_rows
from tests.loops import assert_moved, assert_same, routed_values, tiny
from tests.trainers import drifts, parameters, settings, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = ["lfm2", "qwen3_next"]  # whole tensors; rows beside a gate's
SHORT = {"max_steps": 3, "logging_steps": 1, "bf16": False, "gradient_checkpointing": False}


def dpo(
    model: nn.Module, output: Path, *callbacks: TrainerCallback, peft_config: Any = None, **changes: Any
) -> Trainer:
    """Preferences between two short answers; the reference policy has the same weights."""
    words = [f"w{i}" for i in range(20, 36)]
    rows = Dataset.from_dict(
        {"prompt": ["w11 w12 w13"] * 16, "chosen": words, "rejected": [f"{word} w15 w16" for word in words]}
    )
    adapters = peft_config is not None or hasattr(model, "peft_config")
    options = {"peft_config": peft_config} if adapters else {"ref_model": tiny(model.config.model_type)}
    args = DPOConfig(**{**settings(output), **SHORT, **changes})
    return train(DPOTrainer, model, rows, callbacks, args=args, **options)


def grpo(model: nn.Module, output: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    """Two sampled completions a prompt, rewarded for their letters; a reference policy where there are adapters."""
    rows = Dataset.from_dict({"prompt": [f"w11 w12 w{i}" for i in range(20, 36)]})
    sizes: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    beta = 0.1 if hasattr(model, "peft_config") else 0.0
    sizes |= {"gradient_accumulation_steps": 1, "beta": beta}
    args = GRPOConfig(**{**settings(output), **SHORT, **sizes, **changes})

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    return train(GRPOTrainer, model, rows, callbacks, args=args, reward_funcs=reward)


def train(kind: Any, model: nn.Module, rows: Dataset, callbacks: Any, **options: Any) -> Trainer:
    set_seed(3)
    trainer = kind(model, train_dataset=rows, processing_class=tokenizer(), callbacks=list(callbacks), **options)
    trainer.train()
    return trainer


TRAINERS = {"dpo": dpo, "grpo": grpo}
Run = Callable[..., Trainer]


@pytest.fixture(params=TRAINERS)
def trained(request: pytest.FixtureRequest) -> Run:
    return TRAINERS[request.param]


def beside(model: nn.Module) -> dict[str, Tensor]:
    """Everything that is not held: whole parameters, and the free rows of the others (held rows as zeros)."""
    routes, rest = find_routes(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in routes.parameters:
        rows = routes.rows_of(name)
        if rows is None:
            del rest[name]
        else:
            clear_rows(rest[name], rows)
    return rest


@pytest.mark.parametrize("case", CASES)
def test_freeze_holds_every_bit_and_the_rest_learns(trained: Run, case: str, tmp_path: Path) -> None:
    frozen, free = trained(tiny(case), tmp_path / "frozen", RouteGuard()), trained(tiny(case), tmp_path / "free")
    assert_same(routed_values(tiny(case)), routed_values(frozen.model))
    assert_moved(routed_values(tiny(case)), routed_values(free.model))
    start, unguarded = beside(tiny(case)), beside(free.model)
    learns = [name for name in start if not torch.equal(start[name], unguarded[name])]
    assert len(learns) > 0.9 * len(start)
    assert_moved({name: start[name] for name in learns}, beside(frozen.model))
    assert drifts(frozen) == [0.0, 0.0, 0.0] and not drifts(free)


@pytest.mark.parametrize("case", CASES)
def test_the_papers_method_trains_as_without_a_guard_and_puts_back(trained: Run, case: str, tmp_path: Path) -> None:
    restored = trained(tiny(case), tmp_path / "restored", RouteGuard(Track(), QKRestore()))
    free = trained(tiny(case), tmp_path / "free")
    assert_same(routed_values(tiny(case)), routed_values(restored.model))
    assert_same(beside(free.model), beside(restored.model))
    assert_moved(routed_values(tiny(case)), routed_values(free.model))
    before = next(
        line["routeguard/drift_before_restore"]
        for line in restored.state.log_history
        if "routeguard/drift_before_restore" in line
    )
    assert len(drifts(restored)) == 3 and min(drifts(restored)) > 0 and before == pytest.approx(drifts(restored)[-1])


@pytest.mark.parametrize("mode", [LowLR(0.1), Anchor(50.0)], ids=["low_lr", "anchor"])
def test_routing_moves_less(trained: Run, mode: Any, tmp_path: Path) -> None:
    held_back, free = (trained(tiny("lfm2"), tmp_path / str(m), RouteGuard(m)) for m in (mode, Track()))
    assert 0 < drifts(held_back)[-1] < 0.6 * drifts(free)[-1]


# -- adapters: the reference policy is the model with its adapter switched off, or a second adapter --------------------

MODES = {
    "freeze": lambda: RouteGuard(),
    "low_lr": lambda: RouteGuard(LowLR(0.1)),
    "anchor": lambda: RouteGuard(Anchor(50.0)),
    "restored": lambda: RouteGuard(Track(), QKRestore()),
}


def adapted(case: str, *targets: str) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=[f"{t}_proj" for t in targets or "qkv"], task_type="CAUSAL_LM")
    return get_peft_model(tiny(case), config)


def deltas(model: nn.Module) -> dict[str, Tensor]:
    """The held rows of B·A, of every adapter."""
    return {
        f"{pair.routes[0].parameter}#{at}": take_rows((pair.b @ pair.a).detach(), pair.rows)
        for at, pair in enumerate(lora_pairs(model, find_routes(model)))
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_beside_a_reference_adapter(trained: Run, mode: str, case: str, tmp_path: Path) -> None:
    """TRL switches adapters at every step for the reference policy, and with that makes all of one trainable."""
    guarded = trained(adapted(case), tmp_path / "guarded", MODES[mode]())
    free = trained(adapted(case), tmp_path / "free", RouteGuard(Track()))
    adapters = set(guarded.model.peft_config)
    assert adapters in ({"default", "ref"}, {"default"})  # TRL before 1 switches the only adapter off instead
    assert sum(delta.any().item() for delta in deltas(free.model).values()) == len(deltas(free.model)) / len(adapters)
    moved = any(delta.any() for delta in deltas(guarded.model).values())
    assert moved == (mode in ("low_lr", "anchor"))
    if mode == "restored":
        assert drifts(guarded) == drifts(free)
    else:
        assert moved == (drifts(guarded)[-1] > 0) and drifts(guarded)[-1] < 0.6 * drifts(free)[-1]


def test_frozen_adapters_take_no_part_in_clipping(trained: Run, tmp_path: Path) -> None:
    """Bit for bit the training of a model that has no adapters there, although PEFT makes them trainable again."""
    frozen = adapted("lfm2")
    other = adapted("lfm2", "v")
    start = dict(frozen.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".lora_" in name:
                parameter.copy_(start[name])
    guarded = trained(frozen, tmp_path / "guarded", RouteGuard(), max_grad_norm=1e-3)
    plain = trained(other, tmp_path / "plain", max_grad_norm=1e-3)
    learnt = {name: value for name, value in parameters(plain).items() if ".default." in name}
    assert any("lora_B" in name and value.any() for name, value in learnt.items())
    assert_same(learnt, {name: parameters(guarded)[name] for name in learnt})


@pytest.mark.parametrize("ahead", [False, True], ids=["each_step", "precomputed"])
def test_dpo_that_switches_its_only_adapter_off(ahead: bool, tmp_path: Path) -> None:
    model = tiny("lfm2")
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = dpo(model, tmp_path, RouteGuard(), peft_config=config, precompute_ref_log_probs=ahead)
    assert set(trainer.model.peft_config) == {"default"} and drifts(trainer) == [0.0, 0.0, 0.0]
    assert not any(delta.any() for delta in deltas(trainer.model).values())
    assert sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for name, p in trainer.model.named_parameters() if "v_proj.lora" in name
    )
