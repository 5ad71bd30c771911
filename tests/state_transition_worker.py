"""One of two processes that train a converted model under DDP: `python -m tests.state_transition_worker FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import set_seed

from routeguard.state_transition.convert import add_state_transition
from routeguard.state_transition.trainer import StateTransitionTrainer
from tests.leaving import leave_together
from tests.loops import tiny
from tests.state_transition_texts import config, text
from tests.trainers import sft_arguments, tokenizer


def rows() -> Dataset:
    """Eight texts of one length; in the first batch one process has a text without steps."""
    plain = text(27, seed=9).tolist()
    ids = [text(4, "(", 3, ")", "[", 5, ")", "(", 3, ")", 4, seed=row).tolist() for row in range(8)]
    ids[2], ids[3] = plain, plain[::-1]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trained(output: Path, **changes: Any) -> StateTransitionTrainer:
    set_seed(3)
    transition = add_state_transition(tiny("llama"), config())
    arguments = sft_arguments(
        output,
        **{
            "max_steps": 2,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-2,
            "weight_decay": 0.0,
            "train_sampling_strategy": "sequential",
            "logging_steps": 1,
            **changes,
        },
    )
    trainer = StateTransitionTrainer(
        transition.model, args=arguments, train_dataset=rows(), processing_class=tokenizer()
    )
    trainer.train()
    return trainer


def main() -> None:
    folder = Path(sys.argv[1])
    for name, checkpointing in (("plain", False), ("spared", True)):
        trainer = trained(folder / name, per_device_train_batch_size=2, gradient_checkpointing=checkpointing)
        weights = {key: value.detach() for key, value in trainer.transition.named_parameters()}
        torch.save(weights, folder / f"{name}.{trainer.args.process_index}.pt")
        if trainer.is_world_process_zero():
            assert "DistributedDataParallel" in type(trainer.model_wrapped).__name__
            trainer.save_model(str(folder / f"{name}-saved"))
    leave_together()


if __name__ == "__main__":
    main()
