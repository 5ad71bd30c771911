"""Real chain-of-thought traces: the few-shot examples that lm-eval ships for BBH, MMLU (flan-CoT) and GSM8K."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import yaml

LEAD = "Let's think step by step."
SOURCES = (
    "lm_eval/tasks/bbh/cot_fewshot/",
    "lm_eval/tasks/mmlu/flan_cot_fewshot/",
    "lm_eval/tasks/gsm8k/gsm8k-cot.yaml",
)
# Whole tasks, so that no question of a held-out task is trained on; none has a sibling of another size among the rest.
HELD_OUT_TASKS = (
    "date_understanding", "navigate", "web_of_lies", "mmlu_anatomy", "mmlu_econometrics", "mmlu_formal_logic",
    "mmlu_high_school_physics", "mmlu_international_law", "mmlu_nutrition", "mmlu_world_religions",
)  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """One question with its written-out reasoning; `completion` starts with the white space that follows the prompt."""

    task: str
    prompt: str
    completion: str


def read_traces(wheel: Path) -> list[Trace]:
    """Read every few-shot chain-of-thought example from the lm-eval wheel, without installing it."""
    traces: list[Trace] = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not (name.startswith(SOURCES) and name.endswith(".yaml")) or Path(name).name.startswith("_"):
                continue
            config = yaml.safe_load(archive.read(name))
            for sample in config["fewshot_config"]["samples"]:
                question = sample.get("question", sample.get("input")).strip()
                reasoning = sample["target"].strip().removeprefix(LEAD).strip()
                traces.append(Trace(Path(name).stem, f"Q: {question}\nA: {LEAD}", f" {reasoning}"))
    if not traces:
        raise ValueError(f"{wheel.name} holds no few-shot trace under {SOURCES}")
    return traces


def split_by_task(traces: list[Trace]) -> tuple[list[Trace], list[Trace]]:
    """Return (training, held-out) traces, split by whole tasks; ValueError when a held-out task is not among them."""
    if absent := sorted(set(HELD_OUT_TASKS) - {trace.task for trace in traces}):
        raise ValueError(f"held-out tasks {absent} are not among the traces")
    held_out = [trace for trace in traces if trace.task in HELD_OUT_TASKS]
    return [trace for trace in traces if trace.task not in HELD_OUT_TASKS], held_out


def token_count(trace: Trace, tokenizer) -> int:
    """Return how many tokens prompt and completion take, with the start and end marks."""
    return len(tokenizer(trace.prompt + trace.completion).input_ids) + 1


def to_dataset(traces: list[Trace]):
    """Return the traces as a `datasets.Dataset` with the prompt and completion columns that `SFTTrainer` reads."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": trace.prompt, "completion": trace.completion} for trace in traces])


def completion_loss(model, tokenizer, traces: list[Trace]) -> float:
    """Return the mean negative log-likelihood (nats a token) of the completions, the end mark left out."""
    import torch

    total, count = 0.0, 0
    model.eval()
    for trace in traces:
        prompt_ids = tokenizer(trace.prompt).input_ids
        completion_ids = tokenizer(trace.completion, add_special_tokens=False).input_ids
        ids = torch.tensor([prompt_ids + completion_ids])
        with torch.no_grad():
            logits = model(input_ids=ids, logits_to_keep=len(completion_ids) + 1, use_cache=False).logits
        target = ids[0, -len(completion_ids) :]
        total += torch.nn.functional.cross_entropy(logits[0, :-1].float(), target, reduction="sum").item()
        count += len(completion_ids)
    return total / count
