"""Real Trainer and SFTTrainer runs on tiny zoo models, a second or two each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from trl import SFTConfig, SFTTrainer

from routeguard import Anchor, LowLR, QKRestore, RouteGuard, Track
from tests.loops import HIGH, LOW

MODES: dict[str, Callable[[], RouteGuard]] = {
    "freeze": RouteGuard,
    "low_lr": lambda: RouteGuard(LowLR(0.1)),
    "anchor": lambda: RouteGuard(Anchor(30.0)),
    "restored": lambda: RouteGuard(Track(), QKRestore()),
}


def dataset(rows: int = 24, length: int = 16) -> Dataset:
    """Random token ids; `labels` too, so that Trainer and SFTTrainer take the same rows."""
    ids = torch.randint(LOW, HIGH, (rows, length), generator=torch.Generator().manual_seed(7)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def arguments(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**{**settings(output), **changes})


def sft_arguments(output: Path, **changes: Any) -> SFTConfig:
    options = {
        **settings(output),
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": None,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return SFTConfig(**{**options, **changes})


def settings(output: Path) -> dict[str, Any]:
    """Four short steps with accumulation, decay and clipping."""
    return {
        "output_dir": str(output),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }


def run(
    model: nn.Module | None,
    output: Path,
    *callbacks: TrainerCallback,
    sft: bool = False,
    resume: str | None = None,
    trainer_options: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """Train and return the trainer. The global seed is set, so that runs compare."""
    trainer = make(model, output, *callbacks, sft=sft, trainer_options=trainer_options, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make(
    model: nn.Module | None,
    output: Path,
    *callbacks: TrainerCallback,
    sft: bool = False,
    trainer_options: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    set_seed(3)
    options = {"train_dataset": dataset(), "callbacks": list(callbacks), **(trainer_options or {})}
    if sft:
        return SFTTrainer(model, args=sft_arguments(output, **changes), processing_class=tokenizer(), **options)
    return Trainer(model, args=arguments(output, **changes), **options)


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of every parameter of the trained model."""
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def drifts(trainer: Trainer) -> list[float]:
    """The largest drift in each log line that has one."""
    return [line["routeguard/drift_max"] for line in trainer.state.log_history if "routeguard/drift_max" in line]


def tokenizer() -> Any:
    """The smallest tokenizer TRL accepts: words "w2" to "w79", apart by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, HIGH)}}
    model = Tokenizer(WordLevel(words, "<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    inputs = ["input_ids", "attention_mask"]  # transformers before 5 would add token types, which no decoder takes
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", model_input_names=inputs
    )
