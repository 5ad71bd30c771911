"""Run the demo: fine-tune the tiny hybrid in real `SFTTrainer` runs, with and without a guard, and score them."""

from __future__ import annotations

import math
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from routeguard.demo import evaluate, tasks
from routeguard.demo.model import WEIGHTS, load_model, load_tokenizer
from routeguard.restoration.in_memory import restored
from routeguard.routes.collection import ROUTING_ROLES, Role
from routeguard.routes.find import find_routes
from routeguard.training.guard import RouteGuard

Progress = Callable[[str, int, int], None]

BATCH_SIZE = 16
LEARNING_RATE = 2e-3
SAMPLE_WORDS = 95
NUM_THREADS = 1


@dataclass(frozen=True)
class Repair:
    """A repair tried on a finished run: `restore(model, reference, method=…, roles=…)`."""

    name: str
    method: str
    roles: tuple[Role, ...] = ROUTING_ROLES


@dataclass(frozen=True)
class Variant:
    """One fine-tuning run: `guard` holds the arguments of `RouteGuard`, None for no guard at all."""

    name: str
    guard: Mapping[str, Any] | None
    repairs: tuple[Repair, ...] = ()


BEFORE = "before fine-tuning"
DEFAULT_VARIANTS = (
    Variant("unguarded", None, (Repair("restored afterwards", "qk"),)),
    Variant("guarded (freeze)", {}),
    Variant("guarded (l2_sp)", {"protect": "l2_sp"}),
)
ALL_VARIANTS = (
    Variant(
        "unguarded",
        None,
        (
            Repair("restored afterwards", "qk"),
            Repair("interpolated afterwards", "interpolate"),
            Repair("values restored", "qk", roles=("value",)),
        ),
    ),
    Variant("guarded (freeze)", {}),
    Variant("guarded (low_lr)", {"protect": "low_lr"}),
    Variant("guarded (anchor)", {"protect": "anchor"}),
    Variant("guarded (l2_sp)", {"protect": "l2_sp"}),
    Variant("tracked, then qk_pro", {"protect": "track", "restore": "qk_pro"}),
)


@dataclass(frozen=True)
class Row:
    """What one model scored.

    Attributes:
        name: which model, for example "unguarded".
        seed: of the fine-tuning data and run.
        recall: mean digit accuracy of the needles, by context length in tokens.
        reasoning: accuracy in running sums.
        drift: `‖W − W₀‖ / ‖W₀‖` over the query and key weights of the full-attention layers together.
        train_seconds: wall time of the `SFTTrainer` run, 0 where the model needed none of its own.
    """

    name: str
    seed: int
    recall: dict[int, float]
    reasoning: evaluate.Reasoning
    drift: float
    train_seconds: float


@dataclass(frozen=True)
class DemoResult:
    """All rows of a demo, in the order they were measured, with what they were measured under."""

    rows: tuple[Row, ...]
    steps: int
    seeds: int
    seconds: float

    @property
    def names(self) -> tuple[str, ...]:
        """Row names in order, each once."""
        return tuple(dict.fromkeys(row.name for row in self.rows))

    def of(self, name: str) -> tuple[Row, ...]:
        """The rows of that name, one a seed."""
        return tuple(row for row in self.rows if row.name == name)


def training_data(tokenizer: PreTrainedTokenizerBase, *, num_samples: int, seed: int) -> Dataset:
    """Make the chain-of-thought data: running sums over the whole table, each step looking up the previous variable.

    The columns are `input_ids` and `labels`, which `SFTTrainer` takes as they are. A text column would put filler and
    operands in the loss too; they are random, so the labels leave them out (-100), as one masks user turns.
    """
    rng = random.Random(f"sft {seed}")
    samples = [tasks.sum_sample(SAMPLE_WORDS, rng, sums="all", reach="previous") for _ in range(num_samples)]
    input_ids: list[list[int]] = tokenizer([sample.text for sample in samples])["input_ids"]
    labels = [
        [token if counts else -100 for token, counts in zip(ids, (False, *sample.in_loss), strict=True)]
        for ids, sample in zip(input_ids, samples, strict=True)
    ]
    return Dataset.from_dict({"input_ids": input_ids, "labels": labels})


def plain_arguments(output_dir: Path, *, steps: int, batch_size: int, learning_rate: float, seed: int) -> SFTConfig:
    """The settings of a small run on the CPU: AdamW at a linearly falling rate, fp32, finished rows, nothing saved."""
    with warnings.catch_warnings():
        # The only spelling that switches off TRL's default is one that transformers has deprecated.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
        return SFTConfig(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=min(20, steps // 2),
            weight_decay=0.0,
            max_length=None,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            logging_steps=20,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_dir: Path,
    steps: int,
    seed: int,
    callbacks: Sequence[TrainerCallback],
) -> None:
    """Fine-tune `model` in place on chain-of-thought data: AdamW, 16 samples a step, fp32, no checkpointing."""
    args = plain_arguments(output_dir, steps=steps, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE, seed=seed)
    trainer = SFTTrainer(
        model,
        args=args,
        train_dataset=training_data(tokenizer, num_samples=steps * BATCH_SIZE, seed=seed),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def query_key_drift(model: PreTrainedModel, start: Mapping[str, torch.Tensor]) -> float:
    """Relative Frobenius distance of the full-attention query and key weights from `start`, all of them together."""
    now = dict(model.named_parameters())
    names = dict.fromkeys(route.parameter for route in find_routes(model))
    moved = sum(float((now[name].detach() - start[name]).square().sum()) for name in names)
    size = sum(float(start[name].square().sum()) for name in names)
    return math.sqrt(moved / size)


def run_demo(
    output_dir: str | Path,
    *,
    seeds: int = 1,
    all_modes: bool = False,
    steps: int = 600,
    progress: Progress | None = None,
    recall_lengths: Sequence[int] = evaluate.RECALL_LENGTHS,
    num_samples: int = 48,
) -> DemoResult:
    """Measure what chain-of-thought fine-tuning does to recall: unguarded, guarded, and repaired afterwards.

    Args:
        output_dir: the trainers' folders go to `output_dir/runs`; those of an earlier demo there are replaced.
        seeds: how many times to repeat everything, with seeds 0, 1, …
        all_modes: also run every other mode of protection and repair.
        steps: optimizer steps of each fine-tuning run.
        progress: called with (what is running, steps done, steps in all).
        recall_lengths: context lengths in tokens to test recall at.
        num_samples: contexts a length (six needles, twelve digits each), and chains of sums of each kind.

    Returns:
        The rows, every one measured in this call. The same arguments give the same rows on the same machine.

    Raises:
        ValueError: `seeds` or `steps` is less than 1.
    """
    if seeds < 1 or steps < 1:
        raise ValueError(f"seeds and steps must be at least 1; got seeds={seeds}, steps={steps}")
    report = progress or (lambda stage, done, total: None)
    tokenizer = load_tokenizer()
    start = {name: parameter.detach() for name, parameter in load_model().named_parameters()}
    began = time.perf_counter()

    def score(name: str, seed: int, model: PreTrainedModel, seconds: float = 0.0) -> Row:
        report(f"{name}: measuring", 0, 0)
        recall = {n: evaluate.recall(model, tokenizer, n, num_samples=num_samples) for n in recall_lengths}
        reasoning = evaluate.reasoning(model, tokenizer, num_samples=num_samples)
        return Row(name, seed, recall, reasoning, query_key_drift(model, start), seconds)

    rows: list[Row] = []
    with _threads(NUM_THREADS):
        before = score(BEFORE, 0, load_model())
        for seed in range(seeds):
            rows.append(Row(BEFORE, seed, before.recall, before.reasoning, before.drift, 0.0))
            for variant in ALL_VARIANTS if all_modes else DEFAULT_VARIANTS:
                slug = re.sub(r"\W+", "-", variant.name).strip("-")
                folder = _fresh_folder(Path(output_dir) / "runs" / f"{slug}-seed{seed}")
                rows += _run_variant(variant, folder, tokenizer, seed=seed, steps=steps, report=report, score=score)
    return DemoResult(tuple(rows), steps, seeds, time.perf_counter() - began)


def _run_variant(
    variant: Variant,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    steps: int,
    report: Progress,
    score: Callable[..., Row],
) -> list[Row]:
    """Fine-tune once, score it, then score each repair of it."""
    label = f"{variant.name}, seed {seed}" if seed else variant.name
    model = load_model()
    callbacks: list[TrainerCallback] = [_StepReport(label, report)]
    if variant.guard is not None:
        callbacks.append(RouteGuard(**variant.guard))
    began = time.perf_counter()
    fine_tune(model, tokenizer, output_dir=folder, steps=steps, seed=seed, callbacks=callbacks)
    rows = [score(variant.name, seed, model, time.perf_counter() - began)]
    for repair in variant.repairs:
        with restored(model, WEIGHTS, method=repair.method, roles=repair.roles):
            rows.append(score(repair.name, seed, model))
    return rows


class _StepReport(TrainerCallback):  # type: ignore[misc]
    """Passes the trainer's steps on to the demo's progress display."""

    def __init__(self, label: str, report: Progress) -> None:
        self.label = label
        self.report = report

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.report(f"{self.label}: fine-tuning", state.global_step, state.max_steps)


def _fresh_folder(folder: Path) -> Path:
    """Empty and make the folder, so that nothing of an earlier demo is taken for this one's."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Use that many torch threads inside, and the former number again outside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
