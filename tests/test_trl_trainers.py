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
from routeguard.drift.record import read_record
from routeguard.protect.held import held_parameters
from routeguard.protect.rows import clear_rows
from tests.loops import assert_moved, assert_same, routed_values, tiny
from tests.trainers import parameters, settings, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = ["lfm2", "qwen3_next"]  # whole tensors; rows beside a gate's
SHORT = {"max_steps": 3, "logging_steps": 1, "bf16": False, "gradient_checkpointing": False}


def dpo(model: nn.Module, output: Path, *callbacks: TrainerCallback) -> Trainer:
    """Preferences between two short answers; the reference policy has the same weights."""
    words = [f"w{i}" for i in range(20, 36)]
    rows = Dataset.from_dict(
        {"prompt": ["w11 w12 w13"] * 16, "chosen": words, "rejected": [f"{word} w15 w16" for word in words]}
    )
    options = {} if hasattr(model, "peft_config") else {"ref_model": tiny(model.config.model_type)}
    args = DPOConfig(**{**settings(output), **SHORT})
    return train(DPOTrainer, model, rows, callbacks, args=args, **options)


def grpo(model: nn.Module, output: Path, *callbacks: TrainerCallback) -> Trainer:
    """Two sampled completions a prompt, rewarded for their letters; a reference policy where there are adapters."""
    rows = Dataset.from_dict({"prompt": [f"w11 w12 w{i}" for i in range(20, 36)]})
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    beta = 0.1 if hasattr(model, "peft_config") else 0.0
    args = GRPOConfig(**{**settings(output), **SHORT, **sizes, "gradient_accumulation_steps": 1, "beta": beta})

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


def held(model: nn.Module) -> dict[str, Tensor]:
    return routed_values(model, find_routes(model))


def beside(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that is not held: whole parameters, and the free rows of the others (held rows as zeros)."""
    routes, rest = find_routes(trainer.model), parameters(trainer)
    for name in routes.parameters:
        rows = routes.rows_of(name)
        if rows is None:
            del rest[name]
        else:
            clear_rows(rest[name], rows)
    return rest


def drifts(trainer: Trainer) -> list[float]:
    return [line["routeguard/drift_max"] for line in trainer.state.log_history if "routeguard/drift_max" in line]


@pytest.mark.parametrize("case", CASES)
def test_freeze_holds_every_bit_and_the_rest_learns(trained: Run, case: str, tmp_path: Path) -> None:
    start = tiny(case)
    frozen = trained(tiny(case), tmp_path / "frozen", RouteGuard())
    free = trained(tiny(case), tmp_path / "free")
    assert_same(held(start), held(frozen.model))
    assert_moved(held(start), held(free.model))
    begin, end, unguarded = ({n: v for n, v in beside(t).items()} for t in (holder(start), frozen, free))
    moves = [name for name in begin if not torch.equal(begin[name], unguarded[name])]
    assert len(moves) > 0.9 * len(begin)
    assert_moved({n: begin[n] for n in moves}, end)
    assert drifts(frozen) == [0.0, 0.0, 0.0]


def holder(model: nn.Module) -> Any:
    return type("Holder", (), {"model": model})
