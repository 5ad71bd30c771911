"""State-transition reasoning on a tiny model: chains of reasoning steps in constant memory.

    python examples/state_transition.py [--ablations] [--steps 400] [--seed 0] [--output FOLDER]

The pretrained tiny hybrid of the package (frozen) gets linear paths and learns to carry facts over finished steps. Each
chain states two facts, each in a step of its own, and then asks for sums with them, one a step:

    river cloud | let k07 4 | let k31 9 | ask k31 + 3 = 2 ; | ask k07 + 5 = 9 ; | ...

Attention sees the prompt and the current step only, so the facts are out of its sight when a sum asks for them.
Training has up to 6 sums a chain; 4 to 128 are tested, beside baselines that hold as many bytes as the converted model.
About four minutes on one free core; `--ablations` about ten. `examples/state_transition_plots.py` draws the results.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from state_transition_support.costs import Cost, reading_cost
from state_transition_support.evicting import EvictingLayer, HeavyHitterLayer, evicting_cache, evicting_in_one_pass
from state_transition_support.results import Results
from state_transition_support.training import on_the_cpu
from transformers import DynamicCache, set_seed

from routeguard.demo import tasks
from routeguard.demo.model import FULL_ATTENTION_LAYERS, load_model, load_tokenizer
from routeguard.state_transition.convert import add_state_transition
from routeguard.state_transition.step_marks import StepMarks, add_step_tokens
from routeguard.state_transition.trainer import StateTransitionTrainer

NUM_FACTS, MOST_SUMS = 2, 6
TESTED_SUMS = (4, 16, 64, 128)
TESTED_CHAINS, TIMED_CHAINS, TIMED_TOKENS = 24, 3, 27
Read = Callable[[Any], Any]  # token ids [1, tokens] -> logits


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


def tested(tokenizer: Any, marks: StepMarks, num_sums: int, *, plain: bool) -> list[list[int]]:
    """Token ids of the tested chains; `plain`: without step tokens, as the base model knows text."""
    rng = random.Random(f"test {num_sums}")
    texts = [encode(chain(num_sums, rng), tokenizer, marks)[0] for _ in range(TESTED_CHAINS)]
    step_ids = (*marks.start_token_ids, marks.end_token_id)
    return [[token for token in ids if not plain or token not in step_ids] for ids in texts]


@torch.no_grad()
def accuracy(read: Read, texts: list[list[int]], equals: int) -> float:
    """Share of sums right."""
    right = total = 0
    for ids in texts:
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
        arguments = on_the_cpu(
            folder,
            steps,
            per_device_train_batch_size=16,
            learning_rate=2e-2,
            lr_scheduler_type="linear",
            warmup_steps=20,
            logging_steps=max(1, steps // 4),
            seed=seed,
        )
        data = training_data(tokenizer, marks, rows=16 * steps, seed=seed)
        StateTransitionTrainer(
            transition.model, args=arguments, train_dataset=data, processing_class=tokenizer, beta=beta
        ).train()
    return transition.model.eval()


class Comparison:
    """The methods on the same chains: share of sums right, and what reading costs, by number of sums."""

    def __init__(self, results: Results, tokenizer: Any, marks: StepMarks) -> None:
        self.results, self.tokenizer, self.marks = results, tokenizer, marks
        self.equals = tokenizer.convert_tokens_to_ids(tasks.EQUALS)

    def score(self, name: str, read: Read, *, plain: bool = False) -> None:
        found = {
            n: accuracy(read, tested(self.tokenizer, self.marks, n, plain=plain), self.equals) for n in TESTED_SUMS
        }
        self.results.note(name, accuracy=found)
        print(f"{name:<40}" + "".join(f"{found[n]:>8.2f}" for n in TESTED_SUMS), flush=True)

    def cost(self, name: str, read: Read, one_by_one: Callable[[Any], Cost], *, plain: bool = False) -> Cost:
        """Note the costs over a few chains, and whether answers token by token are those of one pass."""
        same = True
        found: dict[int, Cost] = {}
        for n in TESTED_SUMS:
            costs = []
            for ids in tested(self.tokenizer, self.marks, n, plain=plain)[:TIMED_CHAINS]:
                costs.append(one_by_one(torch.tensor([ids])))
                asked = torch.tensor([token == self.equals for token in ids])
                with torch.no_grad():
                    in_one_pass = read(torch.tensor([ids]))[0].argmax(-1)
                same &= torch.equal(costs[-1].best[asked], in_one_pass[asked])
            found[n] = min(costs, key=lambda cost: cost.ms_per_token)
        kinds = ("kv_bytes", "state_bytes", "ms_per_token")
        self.results.note(
            name, same_token_by_token=same, **{kind: {n: getattr(found[n], kind) for n in found} for kind in kinds}
        )
        print(
            f"{'':<6}" + ", ".join(f"{n} sums: {c.kv_bytes:,} + {c.state_bytes:,} bytes" for n, c in found.items()),
            f"; token by token the answers are the same: {same}",
            flush=True,
        )
        return found[TESTED_SUMS[0]]

    def base(self) -> None:
        """The unconverted model: with everything; with what the converted one's bytes would hold; with less."""
        model = load_model().eval()
        name = "base, full attention"
        self.score(name, logits_of(model), plain=True)
        full = self.cost(
            name, logits_of(model), lambda ids: reading(model, DynamicCache(config=model.config), ids), plain=True
        )
        fresh = add_state_transition(load_model().eval(), self.marks.config())
        text = torch.tensor(tested(self.tokenizer, self.marks, TESTED_SUMS[0], plain=False)[:1])
        ours = reading(fresh.model, fresh.new_cache(), text)
        per_place = full.kv_bytes // len(tested(self.tokenizer, self.marks, TESTED_SUMS[0], plain=True)[0])
        for held, what in ((ours.kv_bytes + ours.state_bytes, "as many bytes"), (ours.kv_bytes, "as many keys")):
            places = held // per_place
            self.results.note_settings(**{f"places, {what}": places})
            for kind in (EvictingLayer, HeavyHitterLayer):
                self.evicting(f"base, {kind.kept}, {what}", kind, places)

    def evicting(self, name: str, kind: type[EvictingLayer], places: int) -> None:
        """The unconverted model with a fixed number of places."""
        model = load_model().eval()
        if kind is HeavyHitterLayer:
            model.set_attn_implementation("eager")
        attention = {layer: model.model.layers[layer].self_attn for layer in FULL_ATTENTION_LAYERS}

        def read(ids: Any) -> Any:
            with evicting_in_one_pass(model, kind, places, ids.shape[1]) as arguments:
                return model(input_ids=ids, use_cache=False, **arguments).logits

        def one_by_one(ids: Any) -> Cost:
            with evicting_cache(model, attention, kind, places) as cache:
                return reading(model, cache, ids)

        self.score(name, read, plain=True)
        self.cost(name, read, one_by_one, plain=True)

    def converted(self, name: str, model: Any, *, costs: bool = False) -> None:
        transition = model.state_transition
        self.score(name, logits_of(model))
        if costs:
            self.cost(name, logits_of(model), lambda ids: reading(model, transition.new_cache(), ids))


def logits_of(model: Any) -> Read:
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def reading(model: Any, cache: Any, ids: Any) -> Cost:
    return reading_cost(model, cache, ids, layers=FULL_ATTENTION_LAYERS, prompt=1, timed=TIMED_TOKENS)


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
    file = None if options.output is None else options.output / "results.json"
    results = Results(file, steps=options.steps, seed=options.seed, chains=TESTED_CHAINS)
    comparison = Comparison(results, tokenizer, marks)

    def trained(name: str, *, costs: bool = False, into: Comparison = comparison, **changes: Any) -> None:
        settings = {"paths": True, "beta": 0.5, "rank": 16, **changes}
        model = train(into.tokenizer, into.marks, steps=options.steps, seed=options.seed, **settings)
        into.converted(name, model, costs=costs)

    print(f"{'share of sums right, by sums':<40}" + "".join(f"{n:>8}" for n in TESTED_SUMS))
    comparison.base()
    comparison.converted(
        "attention to the step only, untrained", add_state_transition(load_model(), marks.config()).model.eval()
    )
    trained("attention to the step only, step tokens trained", paths=False)
    trained("state transition", costs=True)
    if options.ablations:
        trained("without the gate", gate="none")
        trained("without momentum", max_alpha=0.0)
        trained("without distillation", beta=0.0)
        one_pattern = load_tokenizer()
        trained("one pattern", into=Comparison(results, one_pattern, add_step_tokens(one_pattern, 1)))
        trained("momentum as printed (max)", alpha_rule="max")
        trained("reads not normalised", read_norm="none")
        trained("features as they are", features="identity")
    return results.found


if __name__ == "__main__":
    main()
