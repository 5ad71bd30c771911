"""One supervised fine-tuning run with TRL, as a user would write it, with a line of progress now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer


class HeldOutLoss(TrainerCallback):
    """Call `measure` every `every` steps, and at the last, and keep and print what it returns."""

    def __init__(self, measure: Callable[[], float], every: int = 50) -> None:
        self.measure = measure
        self.every = every
        self.series: dict[int, float] = {}

    def on_step_end(self, args, state, control, model, **kwargs) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        self.series[state.global_step] = self.measure()
        model.train()
        print(f"  step {state.global_step:4d}  held-out CoT loss {self.series[state.global_step]:.3f}", flush=True)


class Progress(TrainerCallback):
    """Print step, loss, drift, seconds a step and the minutes left: for the first steps, then every `every` steps."""

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.started = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.started = time.monotonic()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        step = state.global_step
        if not logs or "loss" not in logs or (step % self.every and step > 3):
            return
        seconds = (time.monotonic() - self.started) / step
        left = seconds * (state.max_steps - step) / 60
        drift = logs.get("routeguard/drift_max")
        moved = "" if drift is None else f"  largest Q/K drift {drift:.3%}"
        pace = f"{seconds:.1f} s a step, {left:.0f} min left"
        print(f"  step {step:4d}/{state.max_steps}  loss {logs['loss']:.3f}{moved}  {pace}", flush=True)


def fine_tune(
    model, tokenizer, dataset, callbacks, *, output: Path, steps: int, learning_rate: float, max_length: int, seed: int
):
    """Run CoT-SFT on `model` in place and return the trainer.

    Batches of two, fp32, AdamW with 10 steps of warm-up and then a rate that falls linearly to zero, loss on the
    reasoning only. TRL's defaults
    (bf16, gradient checkpointing) are slower on a CPU and are off.
    """
    args = SFTConfig(
        output_dir=str(output),
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=min(10, steps),
        per_device_train_batch_size=2,
        max_length=max_length,
        train_sampling_strategy="group_by_length",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        seed=seed,
    )
    callbacks = [Progress(), *callbacks]
    trainer = SFTTrainer(model, args=args, train_dataset=dataset, processing_class=tokenizer, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def loss_series(trainer) -> list[float]:
    """Return the training loss of every step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def drift_series(output: Path) -> dict[str, list[float]]:
    """Return, for each layer and role, the relative drift at every step, from the file that the guard keeps.

    Keys read "5 query"; values are ‖W − W₀‖ / ‖W₀‖. ValueError when a step is missing.
    """
    from routeguard import read_drift

    _, samples = read_drift(output / "routeguard" / "drift.jsonl")
    by_step = {sample.step: sample for sample in samples}
    if sorted(by_step) != list(range(1, len(by_step) + 1)):
        raise ValueError(f"the drift file under {output} does not have every step: {sorted(by_step)}")
    series: dict[str, list[float]] = {}
    for step in sorted(by_step):
        for (layer, role), value in by_step[step].factors.items():
            series.setdefault(f"{layer} {role}", []).append(value)
    return series
