"""The two trainings that are compared: linear paths beside the frozen base, and ordinary LoRA on the base itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from routeguard.state_transition.trainer import StateTransitionTrainer

BATCH, RANK = 4, 16
PATH_RATE, LORA_RATE = 5e-3, 1e-3


def on_the_cpu(folder: Path | str, steps: int, **settings: Any) -> SFTConfig:
    """Settings of a short training in fp32 on rows that are token ids already; nothing is saved on the way."""
    return SFTConfig(
        output_dir=str(folder),
        max_steps=steps,
        weight_decay=0.0,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )


def _alike(folder: Path, steps: int, *, learning_rate: float) -> SFTConfig:
    """What both trainings share, but for the learning rate."""
    return on_the_cpu(
        folder,
        steps,
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",  # both see the same batches
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=5,
    )


def train_paths(model: Any, rows: Dataset, tokenizer: Any, folder: Path, steps: int) -> None:
    """Train the paths of a converted model; `folder` gets them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = _alike(folder, steps, learning_rate=PATH_RATE)
        StateTransitionTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer, beta=0.5).train()
    model.state_transition.save_pretrained(folder)


def train_lora(model: Any, rows: Dataset, tokenizer: Any, folder: Path, steps: int) -> None:
    """Train LoRA adapters on query, key and value projections, as many steps on the same rows; `folder` gets them."""
    from peft import LoraConfig

    adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "k_proj", "v_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = _alike(folder, steps, learning_rate=LORA_RATE)
        trainer = SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)
        trainer.train()
    trainer.model.save_pretrained(folder)
    trainer.model.unload()
