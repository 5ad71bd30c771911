"""One fine-tuning run in a real `SFTTrainer`."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import SFTTrainer

from benchmarks.lab.training.data import DataKind, as_dataset, samples_for
from benchmarks.lab.training.mechanisms import RoutingRate, Settle, TrustRegion
from benchmarks.lab.training.plan import Lora, Training
from routeguard.demo.run import plain_arguments
from routeguard.protect.lora_targets import lora_config
from routeguard.training.guard import RouteGuard

BATCH_SIZE = 16
LORA_RANK = 8


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model (adapters merged) and what the run took."""

    model: PreTrainedModel
    steps: int
    learning_rate: float
    batch_size: int
    final_loss: float
    seconds: float


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: Training,
    data: DataKind,
    *,
    seed: int,
    steps: int,
    learning_rate: float,
    output_dir: Path,
) -> Tuned:
    """Fine-tune `model` in place.

    Args:
        model: the pretrained model, fp32 on the CPU.
        tokenizer: the lab's.
        training: what the run does besides.
        data: what is learnt.
        seed: of data and run.
        steps, learning_rate: of the experiment; `training` may scale them.
        output_dir: the Trainer's folder.
    """
    num_steps, rate = max(1, round(steps * training.steps)), learning_rate * training.rate
    batch_size = max(1, BATCH_SIZE * Training().words // training.words)
    samples = samples_for(
        data,
        num_samples=num_steps * batch_size,
        num_words=training.words,
        seed=seed,
        replay=training.replay,
        replayed=training.replayed,
    )
    args = plain_arguments(output_dir, steps=num_steps, batch_size=batch_size, learning_rate=rate, seed=seed)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # the guard's summary, once a run
        trainer = SFTTrainer(
            model,
            args=args,
            train_dataset=as_dataset(samples, tokenizer),
            processing_class=tokenizer,
            callbacks=_callbacks(training),
            peft_config=None if training.lora is None else _lora(model, training.lora),
        )
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    tuned = trainer.model if training.lora is None else trainer.model.merge_and_unload()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Tuned(tuned, num_steps, rate, batch_size, float(logged[-1] if logged else loss), time.perf_counter() - began)


def _callbacks(training: Training) -> list[TrainerCallback]:
    callbacks: list[TrainerCallback] = []
    if training.protect is not None:
        callbacks.append(RouteGuard(protect=training.protect))
    if training.routing_rate != 1.0:
        callbacks.append(RoutingRate(training.routing_rate))
    if training.trust_radius is not None:
        callbacks.append(TrustRegion(training.trust_radius))
    if training.settle_at is not None:
        callbacks.append(Settle(training.settle_at))
    return callbacks


def _lora(model: PreTrainedModel, lora: Lora) -> Any:
    if lora == "without_qk":
        return lora_config(model, r=LORA_RANK, lora_alpha=2 * LORA_RANK, task_type="CAUSAL_LM")
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
