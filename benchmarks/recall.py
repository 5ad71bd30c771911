"""What recall costs: the teacher-forced measurement, reading in pieces, and the probe in a training run.

    python -m benchmarks.recall                 # CPU, 1 thread, about two minutes
    python -m benchmarks.recall --device cuda

The model is a hybrid (LFM2) of 16 million parameters with a vocabulary of 32,000, random, made in memory; for training
one of 1.5 million with 4,000. Floors: plain forward passes over the same tokens in the same batches (all logits, as a
model returns them), one pass over the whole prompt, and the same training run without a probe. Peak memory is that
above the model: of fresh processes on the CPU, of the allocator on CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._timing import interleaved
from routeguard.recall.answering import answer_forced
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import builtin_prose
from routeguard.recall.logits import last_logits
from routeguard.recall.measure import DEPTHS, Plan, measure_recall
from routeguard.recall.probe import RecallProbe
from routeguard.recall.registry import find_tasks
from routeguard.recall.sample import Sample

VOCABULARY = 32_000
TOKENIZER_TOKENS = 4000
TASK, LENGTH, SAMPLES, BATCH_TOKENS = "niah_single_2", 1024, 4, 2048
PROMPT, PIECE, KEPT = 8192, 1024, 16
TRAINED_TOKENS, ROWS = 256, 8
MIB = 1 << 20


def build(device: str, *, small: bool = False) -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=TOKENIZER_TOKENS if small else VOCABULARY,
        hidden_size=128 if small else 256,
        intermediate_size=512 if small else 1024,
        num_hidden_layers=4 if small else 8,
        num_attention_heads=4 if small else 8,
        num_key_value_heads=2,
        full_attn_idxs=[1, 3] if small else [2, 5, 7],
        block_auto_adjust_ff_dim=False,
        max_position_embeddings=16_384,
    )
    return Lfm2ForCausalLM(config).to(device).eval()


def build_tokenizer() -> Any:
    """Byte-level BPE over the built-in prose."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_TOKENS, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([" ".join(builtin_prose().words)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def samples_of(tokenizer: Any) -> list[Sample]:
    """The samples that `measure` asks about."""
    plan = Plan(find_tasks(TASK), (LENGTH,), DEPTHS, SAMPLES, builtin_prose())
    encoder = Encoder(tokenizer)
    return [plan.sample(encoder, plan.tasks[0], LENGTH, index) for index in range(SAMPLES)]


def measure(model: Any, tokenizer: Any) -> None:
    measure_recall(
        model, tokenizer, tasks=TASK, lengths=(LENGTH,), num_samples=SAMPLES, batch_tokens=BATCH_TOKENS, insist=True
    )


def answer(model: Any, tokenizer: Any, samples: list[Sample]) -> None:
    size = BATCH_TOKENS // LENGTH
    for first in range(0, len(samples), size):
        answer_forced(model, tokenizer, samples[first : first + size])


@torch.no_grad()
def forward(model: Any, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        model(input_ids=batch, use_cache=False)


def batches_of(samples: list[Sample], device: str) -> list[Tensor]:
    """The samples' tokens, prompt and answer, batched as the measurement does."""
    longest = max(len(sample.answer_ids) for sample in samples)
    rows = [(*s.prompt_ids, *s.answer_ids, *[0] * (longest - len(s.answer_ids))) for s in samples]
    return list(torch.tensor(rows, device=device).split(BATCH_TOKENS // LENGTH))


@torch.no_grad()
def read(model: Any, prompt: Tensor, piece: int | None) -> None:
    last_logits(model, prompt, KEPT, prefill_tokens=piece)


def work(name: str, device: str) -> Callable[[], object]:
    """One of the things whose memory is measured, ready to run."""
    model = build(device)
    if name in ("forced", "plain"):
        tokenizer = build_tokenizer()
        samples = samples_of(tokenizer)
        if name == "forced":
            return partial(answer, model, tokenizer, samples)
        return partial(forward, model, batches_of(samples, device))
    prompt = torch.randint(0, VOCABULARY, (1, PROMPT), device=device)
    return partial(read, model, prompt, PIECE if name == "pieces" else None)


def peak_bytes(name: str, device: str) -> int:
    """Peak memory of one run above what was there before it."""
    if device == "cuda":
        run = work(name, device)
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    # A fresh process: an allocator that has already grown would hide what is needed.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_here, (name,))


def _peak_here(name: str) -> int:
    torch.set_num_threads(1)
    run = work(name, "cpu")
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    """Not `ru_maxrss`: a process inherits that from the one which started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def compare_memory(names: tuple[str, str], what: str, device: str) -> None:
    if device == "cpu" and sys.platform != "linux":
        print(f"  {what:<44} skipped: the peak is read from /proc, which is Linux")
        return
    mine, floor = (peak_bytes(name, device) for name in names)
    print(f"  {what:<44} {mine / floor:.2f}  ({mine / MIB:.0f} MiB against {floor / MIB:.0f} MiB)")


def forced(device: str, rounds: int, clock: str) -> None:
    print(f"teacher-forced recall against plain forward passes: {SAMPLES} samples of {TASK} at {LENGTH} tokens")
    model, tokenizer = build(device), build_tokenizer()
    samples = samples_of(tokenizer)
    functions: dict[str, Callable[[], object]] = {
        "plain": partial(forward, model, batches_of(samples, device)),
        "answering the samples": partial(answer, model, tokenizer, samples),
        "measure_recall, samples made anew": partial(measure, model, tokenizer),
    }
    timings = interleaved(functions, rounds=rounds, warmup=1, device=device, clock=clock)
    for name in list(functions)[1:]:
        low, high = timings.spread(name, "plain")
        print(f"  {'time, ' + name:<44} {timings.ratio(name, 'plain'):.2f}  (middle half {low:.2f} to {high:.2f})")
    compare_memory(("forced", "plain"), "peak memory, answering the samples", device)


def pieces(device: str, rounds: int, clock: str) -> None:
    print(f"reading {PROMPT} tokens in pieces of {PIECE} against one pass, the last {KEPT} logits kept in both")
    model, prompt = build(device), torch.randint(0, VOCABULARY, (1, PROMPT), device=device)
    functions: dict[str, Callable[[], object]] = {
        "once": partial(read, model, prompt, None),
        "pieces": partial(read, model, prompt, PIECE),
    }
    timings = interleaved(functions, rounds=rounds, warmup=1, device=device, clock=clock)
    low, high = timings.spread("pieces", "once")
    print(f"  {'time':<44} {timings.ratio('pieces', 'once'):.2f}  (middle half {low:.2f} to {high:.2f})")
    compare_memory(("pieces", "once"), "peak memory", device)


def train(device: str, steps: int, callbacks: list[Any]) -> float:
    """Seconds of `trainer.train()` over random rows."""
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, TOKENIZER_TOKENS, (ROWS * steps, TRAINED_TOKENS), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = Trainer(
            build(device, small=True).train(),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            processing_class=build_tokenizer(),
            callbacks=callbacks,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            began = time.perf_counter()
            trainer.train()
            return time.perf_counter() - began


def probed(device: str, steps: int) -> None:
    print(f"the probe's defaults in a run of {steps} steps of {ROWS} x {TRAINED_TOKENS} tokens, small model")
    plain = train(device, steps, [])
    probe = RecallProbe()
    train(device, steps, [probe])
    seconds = list(probe.seconds.values())
    one, step = max(seconds), plain / steps
    result = probe.results[0]
    samples = len(result.scores) // len(result.lengths) // len(result.tasks)
    asked = f"{samples} samples of {' and '.join(result.tasks)} at {' and '.join(map(str, result.lengths))} tokens"
    print(f"  {len(seconds)} measurements of {asked}: share of the unguarded run {sum(seconds) / plain:.3f}")
    print(
        f"  a measurement takes as long as {one / step:.1f} steps of training: the first and the last cost 1 % of a run"
    )
    print(f"  of {2 * one / step / 0.01:.0f} steps, those between at most 1 % of any")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="cpu", help="cpu: for one thread on a busy machine")
    arguments = parser.parse_args(argv)
    device, rounds, clock = arguments.device, arguments.rounds, arguments.clock
    if device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.recall --device cuda: skipped, there is no CUDA device here")
        return
    if device == "cpu":
        torch.set_num_threads(arguments.threads)
    parameters = sum(parameter.numel() for parameter in build("cpu").parameters())
    print(f"recall, {device}: {parameters / 1e6:.0f}M parameters, vocabulary {VOCABULARY} (ratios to the floors named)")
    forced(device, rounds, clock)
    pieces(device, rounds, clock)
    probed(device, arguments.steps)


if __name__ == "__main__":
    main()
