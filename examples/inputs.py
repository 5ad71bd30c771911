"""What the examples run on: without options the tiny hybrid of the package, with `--model` a real one.

The tiny hybrid (LFM2, 245 thousand parameters) gets made-up running sums and needs neither network nor GPU. Any other
model gets data of the Hub and TRL's own choice of precision and gradient checkpointing.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset

from routeguard.demo.model import WEIGHTS, load_tokenizer
from routeguard.demo.run import training_data
from routeguard.demo.tasks import EQUALS, sum_sample

TINY = str(WEIGHTS)
TRACES = "open-r1/OpenR1-Math-220k"  # chain of thought: "messages"
PREFERENCES = "trl-lib/ultrafeedback_binarized"  # "chosen", "rejected"
QUESTIONS = "openai/gsm8k"  # "question", "answer", whose last line is "#### 42"
TINY_ROWS, REAL_ROWS = 1600, 5000


def arguments(description: str, *, steps: int, guarded: bool = True) -> Namespace:
    """The options that all examples share; `tiny` says whether the model is the package's own."""
    parser = ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", default=TINY, help="a model of the Hub or a folder; default: the tiny hybrid")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps; default: %(default)s")
    output = Path("output") / Path(sys.argv[0]).stem  # a folder for each script: an adapter beside a model is neither
    parser.add_argument("--output", type=Path, default=output, help="folder to write; default: %(default)s")
    if guarded:
        parser.add_argument("--unguarded", action="store_true", help="measure the same, but protect nothing")
    args = parser.parse_args()
    args.tiny = args.model == TINY
    return args


def trainer_settings(model: str) -> dict[str, Any]:
    """Trainer arguments that every example sets: ten log lines, nothing saved on the way; fp32 for the tiny model."""
    settings = {"save_strategy": "no", "report_to": "none", "logging_steps": 0.1}
    settings["use_cpu"] = not torch.accelerator.is_available()  # else bf16, TRL's default, is refused there
    return {**settings, "bf16": False, "gradient_checkpointing": False} if model == TINY else settings


def recall_questions(model: str) -> dict[str, Any]:
    """What `RecallProbe` and `measure_recall` ask: at a length like that of the training data, and far beyond it."""
    if model == TINY:
        return {"tasks": "demo_needles", "lengths": (128, 512), "num_samples": 32}
    return {"tasks": ("niah_single_3", "niah_multikey_2"), "lengths": (4096, 16384), "num_samples": 20}


def chain_of_thought(model: str) -> Dataset:
    """For supervised fine-tuning: token ids with labels, or conversations."""
    if model == TINY:
        return training_data(load_tokenizer(), num_samples=TINY_ROWS, seed=0)
    return load_dataset(TRACES, split=f"train[:{REAL_ROWS}]").select_columns("messages")


def preferences(model: str) -> Dataset:
    """For DPO: the right digit is chosen, a wrong one rejected; or the better of two answers to a user."""
    if model == TINY:
        rows = [(text, f" {total} ;", f" {(int(total) + off) % 10} ;") for text, total, off in _open_sums()]
        return Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), zip(*rows, strict=True), strict=True)))
    return load_dataset(PREFERENCES, split=f"train[:{REAL_ROWS}]")


def questions(model: str) -> Dataset:
    """For GRPO: a "prompt" that asks for a number, and that number as "answer"."""
    if model == TINY:
        return Dataset.from_list([{"prompt": text, "answer": total} for text, total, _ in _open_sums()])
    rows = load_dataset(QUESTIONS, "main", split="train")
    return rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["question"]}],
            "answer": row["answer"].rpartition("#### ")[2].replace(",", ""),
        },
        remove_columns="question",
    )


def _open_sums() -> list[tuple[str, str, int]]:
    """Running sums that stop after their last `=`, the digit that follows there, and a random number from 1 to 9."""
    rng = random.Random(0)
    found = []
    for _ in range(TINY_ROWS):
        words = sum_sample(60, rng, sums="all", reach="previous").words
        last = max(i for i, word in enumerate(words) if word == EQUALS)
        found.append((" ".join(words[: last + 1]), words[last + 1], rng.randint(1, 9)))
    return found
