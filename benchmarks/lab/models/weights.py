"""Pretrained weights on disk: made once by `python -m benchmarks.lab pretrain`, kept outside of the repository."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.lab.language.chains import PRETRAINED_CHAINS
from benchmarks.lab.language.needles import NEEDLE_KINDS
from benchmarks.lab.language.words import build_tokenizer
from benchmarks.lab.measuring.scores import reasoning, recall
from benchmarks.lab.models.architectures import Architecture
from benchmarks.lab.models.pretraining import pretrain

BUILD = Path("build/lab")
RECORD = "pretraining.json"


def folder_of(architecture: Architecture, seed: int = 0, build: Path = BUILD) -> Path:
    """Where the pretrained weights of an architecture and seed are kept."""
    return build / "models" / f"{architecture.name}-seed{seed}"


def make(architecture: Architecture, *, seed: int = 0, build: Path = BUILD, steps: int | None = None) -> Path:
    """Pretrain and save, with a record of what the model can do; returns the folder.

    Args:
        architecture: which.
        seed: of weights and data.
        build: the folder that holds everything of the lab that is not kept in the repository.
        steps: optimizer steps. Default: the architecture's own.
    """
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    steps = steps or architecture.pretrain_steps
    began = time.perf_counter()

    def report(step: int, loss: float, model: PreTrainedModel) -> None:
        found = {
            f"{kind.name}@{length}": round(recall(model, tokenizer, kind, length, num_samples=16, seed="report"), 2)
            for kind in NEEDLE_KINDS.values()
            for length in ((96, 256) if step < steps - 1 else architecture.lengths)
        }
        chains = {
            kind.name: round(reasoning(model, tokenizer, kind, num_samples=16, seed="report").far, 2)
            for kind in PRETRAINED_CHAINS
        }
        seconds = time.perf_counter() - began
        print(f"{architecture.name} {step}  loss {loss:.3f}  {found}  {chains}  {seconds:.0f} s", flush=True)

    model = pretrain(architecture, tokenizer, seed=seed, steps=steps, report=report)
    seconds = time.perf_counter() - began
    folder = folder_of(architecture, seed, build)
    model.save_pretrained(folder)
    record = {
        "architecture": architecture.name,
        "parameters": model.num_parameters(),
        "seed": seed,
        "steps": steps,
        "learning_rate": architecture.pretrain_rate,
        "seconds": round(seconds, 1),
        "recall": {
            kind.name: {
                length: recall(model, tokenizer, kind, length, num_samples=48, seed="pretrained")
                for length in architecture.lengths
            }
            for kind in NEEDLE_KINDS.values()
        },
        "reasoning": {
            kind.name: asdict(reasoning(model, tokenizer, kind, num_samples=48, seed="pretrained"))
            for kind in PRETRAINED_CHAINS
        },
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return folder


def load(folder: Path) -> PreTrainedModel:
    """A pretrained model in fp32 on the CPU.

    Raises ValueError when it has not been made yet.
    """
    if not (folder / RECORD).is_file():
        raise ValueError(f"no pretrained model in {folder}; make it with `python -m benchmarks.lab pretrain`")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model
