"""Do a run: fine-tune once, then score and record every condition that shares it."""

from __future__ import annotations

import logging
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.lab.conditions.repair import repaired
from benchmarks.lab.conditions.table import BEFORE, Condition
from benchmarks.lab.experiment import journal
from benchmarks.lab.experiment.plan import Experiment, Run
from benchmarks.lab.experiment.seeds import Purpose, purpose_of
from benchmarks.lab.language.needles import DEVELOPMENT, REPLAYED, TESTED, NeedleKind
from benchmarks.lab.measuring.drift import drift
from benchmarks.lab.measuring.scores import reasoning, recall
from benchmarks.lab.training.fine_tune import Tuned, fine_tune

OTHER_KINDS_AT = 256  # tokens at which the replayed kinds are scored


def do_run(experiment: Experiment, run: Run) -> Iterator[journal.Result]:
    """Do a run and yield its results, each of them already in the journal."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    subject = experiment.subject
    model = subject.model()
    if run.training is None:
        yield _recorded(experiment, run.seed, None, model, {}, {})
        return
    scratch = Path(tempfile.mkdtemp(prefix="lab-"))
    try:
        tuned = fine_tune(
            model,
            subject.tokenizer,
            run.training,
            experiment.data,
            seed=run.seed,
            steps=experiment.steps,
            learning_rate=subject.architecture.fine_tune_rate,
            output_dir=scratch,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    moved = drift(tuned.model, subject.start)
    facts = {field.name: getattr(tuned, field.name) for field in fields(Tuned) if field.name != "model"}
    for condition in run.conditions:
        yield _recorded(experiment, run.seed, condition, tuned.model, moved, facts)


def _recorded(
    experiment: Experiment,
    seed: int,
    condition: Condition | None,
    model: PreTrainedModel,
    moved: dict[str, float],
    facts: dict[str, Any],
) -> journal.Result:
    """Score a model under a condition's repair and write the line."""
    subject = experiment.subject
    began = time.perf_counter()
    if condition is None:
        repair: Any = nullcontext()
    else:
        count = condition.repair.heads
        heads = None if count is None else {count: subject.top_heads(count)}
        repair = repaired(model, subject.start, condition.repair, heads=heads)
    with repair:
        scores = _scores(experiment, model, seed)
    result = {
        **experiment.identity(BEFORE if condition is None else condition.name, seed),
        "purpose": purpose_of(seed),
        "settings": experiment.settings(condition),
        **scores,
        "drift": moved,
        "run": facts,
        "score_seconds": time.perf_counter() - began,
        "model": subject.digest,
        "versions": _versions(),
    }
    rounded: journal.Result = _rounded(result)
    journal.append(experiment.path, rounded)
    return rounded


def _scores(experiment: Experiment, model: PreTrainedModel, seed: int) -> dict[str, Any]:
    """Recall by kind and length, and reasoning; the texts depend on the seed only, so that conditions are paired."""
    subject = experiment.subject
    found = {
        kind.name: {
            str(length): recall(
                model, subject.tokenizer, kind, length, num_samples=experiment.num_samples, seed=str(seed)
            )
            for length in lengths
        }
        for kind, lengths in _asked(subject.architecture.lengths, purpose_of(seed)).items()
    }
    chains = reasoning(
        model, subject.tokenizer, experiment.data.chain, num_samples=experiment.num_chains, seed=str(seed)
    )
    return {"recall": found, "reasoning": asdict(chains)}


def _asked(lengths: Sequence[int], purpose: Purpose) -> dict[NeedleKind, Sequence[int]]:
    """Needle kinds and lengths to score. What development has not seen, it cannot have been tuned to."""
    shortly = [length for length in lengths if length == OTHER_KINDS_AT]
    asked: dict[NeedleKind, Sequence[int]] = {DEVELOPMENT: lengths, **dict.fromkeys(REPLAYED, shortly)}
    return {TESTED: lengths, **asked} if purpose == "confirmation" else asked


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("torch", "transformers", "trl", "peft")
    }


def _rounded(value: Any) -> Any:
    """Numbers to five significant places: scores are shares of some hundred answers."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
