"""State-transition reasoning on a tiny model: chains of reasoning steps in constant memory.

    python examples/state_transition.py [--ablations] [--steps 400] [--seed 0] [--output FOLDER]

The pretrained tiny hybrid of the package (frozen) gets linear paths and learns to carry facts over finished steps. Each
chain states two facts, each in a step of its own, and then asks for sums with them, one a step:

    river cloud | let k07 4 | let k31 9 | ask k31 + 3 = 2 ; | ask k07 + 5 = 9 ; | ...

Attention sees the prompt and the current step only, so the facts are out of its sight when a sum asks for them.
Training has up to 6 sums a chain; 4 to 64 are tested. About three minutes on one core; `--ablations` about fifteen.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DynamicCache, set_seed
from trl import SFTConfig

from routeguard.demo import tasks
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.state_transition.convert import StateTransition, add_state_transition
from routeguard.state_transition.step_marks import StepMarks, add_step_tokens
from routeguard.state_transition.trainer import StateTransitionTrainer

NUM_FACTS, MOST_SUMS = 2, 6
TESTED_SUMS = (4, 16, 64)
SINKS, WINDOW = 4, 16  # of the streaming baseline: as many places as prompt and a step take


def chain(num_sums: int, rng: random.Random) -> list[list[str]]:
    """Words of a chain: the prompt, then each step."""
    names = rng.sample(tasks.NAMES, NUM_FACTS)
    values = {name: rng.randrange(10) for name in names}
    steps = [rng.choices(tasks.FILLER, k=3)] + [[tasks.LET, name, str(values[name])] for name in names]
    for _ in range(num_sums):
        name = rng.choice(names)
        added = rng.choice([d for d in range(10) if tasks.is_known_sum(values[name], d)])
        total = str((values[name] + added) % 10)
        steps.append([tasks.ASK, name, tasks.PLUS, str(added), tasks.EQUALS, total, tasks.END])
    return steps


def encode(steps: list[list[str]], tokenizer: Any, marks: StepMarks) -> tuple[list[int], list[int]]:
    """Token ids and labels; the loss counts sums and step tokens. With two patterns, facts have one of their own."""
    ids: list[int] = tokenizer(" ".join(steps[0])).input_ids
    labels = [-100] * len(ids)
    for number, words in enumerate(steps[1:]):
        fact = words[0] == tasks.LET
        start = marks.start_token_ids[0 if fact else -1]
        inner = tokenizer(" ".join(words), add_special_tokens=False).input_ids
        ids += [start, *inner, marks.end_token_id]
        counted = [token if i == 5 else -100 for i, token in enumerate(inner)]
        labels += [start if number else -100, *counted, marks.end_token_id]
    return ids, labels


def training_data(tokenizer: Any, marks: StepMarks, *, rows: int, seed: int) -> Dataset:
    rng = random.Random(f"train {seed}")
    pairs = [encode(chain(rng.randint(1, MOST_SUMS), rng), tokenizer, marks) for _ in range(rows)]
    return Dataset.from_dict({"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]})


@torch.no_grad()
def accuracy(read: Callable[[Any], Any], tokenizer: Any, marks: StepMarks, num_sums: int, *, plain: bool) -> float:
    """Share of sums right over 24 chains; `plain`: without step tokens, as the base model knows text."""
    rng = random.Random(f"test {num_sums}")
    equals = tokenizer.convert_tokens_to_ids(tasks.EQUALS)
    right = total = 0
    for _ in range(24):
        ids, _ = encode(chain(num_sums, rng), tokenizer, marks)
        ids = [token for token in ids if not plain or token not in (*marks.start_token_ids, marks.end_token_id)]
        best = read(torch.tensor([ids])).argmax(-1)[0].tolist()
        places = [i for i, token in enumerate(ids) if token == equals]
        right += sum(best[i] == ids[i + 1] for i in places)
        total += len(places)
    return right / total


def train(tokenizer: Any, marks: StepMarks, *, steps: int, seed: int, paths: bool, beta: float, **settings: Any) -> Any:
    """A converted model, trained; without `paths` only the step tokens are, and finished steps are lost."""
    set_seed(seed)
    transition = add_state_transition(load_model(), marks.config(**settings))
    for path in transition.paths.values():
        path.requires_grad_(paths)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=2e-2,
            lr_scheduler_type="linear",
            warmup_steps=20,
            weight_decay=0.0,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        data = training_data(tokenizer, marks, rows=16 * steps, seed=seed)
        StateTransitionTrainer(
            transition.model, args=arguments, train_dataset=data, processing_class=tokenizer, beta=beta
        ).train()
    return transition.model.eval()


def streaming(model: Any) -> Callable[[Any], Any]:
    """The base model with a few first tokens and a window, as StreamingLLM keeps them."""

    def read(ids: Any) -> Any:
        place = torch.arange(ids.shape[1])
        near = (place[:, None] - place[None, :] < WINDOW) | (place[None, :] < SINKS)
        seen = near & (place[None, :] <= place[:, None])
        return model(input_ids=ids, attention_mask=seen[None, None], use_cache=False).logits

    return read


@torch.no_grad()
def memory(model: Any, tokenizer: Any, marks: StepMarks, num_sums: int) -> tuple[int, int, bool]:
    """Most bytes held while a chain is read token by token, the base model's, and whether the answers are the same."""
    transition: StateTransition = model.state_transition
    ids, _ = encode(chain(num_sums, random.Random(0)), tokenizer, marks)
    cache, held, logits = transition.new_cache(), 0, []
    for i in range(len(ids)):
        logits.append(model(torch.tensor([[ids[i]]]), past_key_values=cache, use_cache=True).logits)
        held = max(held, cache.kv_bytes + cache.state_bytes)
    same = torch.equal(torch.cat(logits, 1).argmax(-1), model(torch.tensor([ids]), use_cache=False).logits.argmax(-1))
    plain = DynamicCache(config=model.config)
    with transition.disabled():
        words = [token for token in ids if token < transition.tokens.base_size]
        model(torch.tensor([words]), past_key_values=plain, use_cache=True)
    full = [plain.layers[layer] for layer in transition.layers]
    return held, sum(layer.keys.nbytes + layer.values.nbytes for layer in full), same


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--output", type=Path, help="write results.json there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = load_tokenizer()
    marks = add_step_tokens(tokenizer, 2)
    rows: dict[str, dict[int, float]] = {}

    def score(name: str, read: Callable[[Any], Any], *, plain: bool = False) -> None:
        rows[name] = {n: accuracy(read, tokenizer, marks, n, plain=plain) for n in TESTED_SUMS}
        print(f"{name:<34}" + "".join(f"{rows[name][n]:>8.2f}" for n in TESTED_SUMS), flush=True)

    def logits_of(model: Any) -> Callable[[Any], Any]:
        return lambda ids: model(input_ids=ids, use_cache=False).logits

    def trained(name: str, **changes: Any) -> Any:
        settings = {"paths": True, "beta": 0.5, "rank": 16, **changes}
        model = train(tokenizer, marks, steps=options.steps, seed=options.seed, **settings)
        score(name, logits_of(model))
        return model

    print(f"{'share of sums right, by sums':<34}" + "".join(f"{n:>8}" for n in TESTED_SUMS))
    score("base, full attention", logits_of(load_model()), plain=True)
    score(f"base, {SINKS} sinks and a window of {WINDOW}", streaming(load_model()), plain=True)
    trained("attention to the step only", paths=False)
    model = trained("state transition")
    costs = {n: memory(model, tokenizer, marks, n) for n in TESTED_SUMS}
    print("bytes held, ours / base: " + ", ".join(f"{n} sums {a:,} / {b:,}" for n, (a, b, _) in costs.items()))
    print(f"token by token the answers are the same: {all(same for _, _, same in costs.values())}")
    if options.ablations:
        trained("without the gate", gate="none")
        trained("without momentum", max_alpha=0.0)
        trained("momentum as printed (max)", alpha_rule="max")
        trained("without distillation", beta=0.0)
        trained("reads not normalised", read_norm="none")
        trained("features as they are", features="identity")
        tokenizer = load_tokenizer()
        marks = add_step_tokens(tokenizer, 1)
        trained("one pattern")
    result = {"steps": options.steps, "seed": options.seed, "rows": rows, "costs": costs}
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
