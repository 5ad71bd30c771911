"""What a probe can afford to ask: its cost, estimated from what is known before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from routeguard.recall.task import Task
from routeguard.recall.training_length import mean_row_tokens

FEWEST, MOST = 4, 16  # samples for each task and length
_UNKNOWN = 8  # where the cost of the training is not known
_ENDS = 0.75  # of the share, at most; the rest is for making the samples and for what the estimate leaves out


@dataclass(frozen=True)
class ProbeBudget:
    """Samples of a probe, and what they cost.

    Attributes:
        num_samples: for each task and length.
        chosen: whether the probe chose that number; False: it was given, or taken over from the run that is resumed.
        ends: estimated share of the training that the first and the last measurement take; None where it is not known.
        total: the same for all measurements where their steps are fixed (`every`), otherwise None.
    """

    num_samples: int
    chosen: bool
    ends: float | None
    total: float | None = None


@dataclass(frozen=True)
class Questions:
    """What a probe asks.

    Attributes:
        tasks, lengths: each task at each length.
        budget: how many samples of each.
        notes: what was left out, if anything.
    """

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    budget: ProbeBudget
    notes: tuple[str, ...] = ()


def training_passes(model: Any, args: Any, dataloader: Any, max_steps: int) -> float | None:
    """What a training costs on one process, in forward passes of one token each; None where its rows tell no length.

    A forward pass counts one, the gradients of activations one more, those of weights one for the share that is
    trained, and gradient checkpointing's second forward pass one: 3 for full fine-tuning (derived; matrix products
    only, so that long contexts' attention and the optimizer count for nothing).

    Args:
        model: the model, as it is trained.
        args: the Trainer's arguments.
        dataloader: the training's; its rows' mean length is taken.
        max_steps: optimizer steps of the whole training.
    """
    row_tokens = mean_row_tokens(dataloader)
    if row_tokens is None or max_steps < 1:
        return None
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * max_steps
    return float(rows) * row_tokens * step_passes(model)


def step_passes(model: Any) -> float:
    """Cost of training on one token, in forward passes: 2 with adapters, 3 with all weights, 1 more if checkpointed."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, trains in sizes if trains) / max(sum(size for size, _ in sizes), 1)
    names = ("gradient_checkpointing", "activation_checkpointing")
    checkpointed = any(getattr(module, name, False) is True for module in model.modules() for name in names)
    return float(2 + trained + checkpointed)


def choose_budget(
    given: int | None,
    *,
    passes: float | None,
    lengths: Sequence[int],
    num_tasks: int,
    share: float,
    every: int | None = None,
    max_steps: int = 0,
) -> ProbeBudget:
    """Choose the number of samples with which two measurements take half of `share`, between 4 and 16.

    Args:
        given: the number, if it is fixed.
        passes: cost of the training (`training_passes`), or None.
        lengths, num_tasks: tokens of a sample, each length once, and how many tasks ask at each.
        share: of the training's time, 0 to 1.
        every, max_steps: to estimate the cost of fixed measurements as well.
    """
    tokens = num_tasks * sum(lengths)  # of a measurement with one sample each
    if passes is None:
        return ProbeBudget(_UNKNOWN if given is None else given, given is None, None)
    affordable = int(share / 2 * passes / (2 * tokens))
    count = min(max(affordable, FEWEST), MOST) if given is None else given
    one = count * tokens / passes
    # The first, and those at multiples of `every`, and the last if it is none of them.
    times = None if every is None else 1 + -(-max_steps // every)
    return ProbeBudget(count, given is None, 2 * one, None if times is None else times * one)


def choose_questions(
    tasks: Sequence[Task],
    lengths: Sequence[int],
    given: int | None,
    *,
    fewer_tasks: bool,
    fewer_lengths: bool,
    passes: float | None,
    share: float,
    every: int | None,
    max_steps: int,
) -> Questions:
    """Choose what to ask, so that the first and the last measurement together stay within `share` if that can be.

    In a short training fewer tasks are asked, then fewer lengths: the first task only, then only at the greatest
    length, which is beyond the training's, where recall is lost first.

    Args:
        tasks, lengths: what is asked where it can be afforded.
        given: the number of samples, if it is fixed.
        fewer_tasks, fewer_lengths: whether those may be reduced.
        passes, share, every, max_steps: as in `choose_budget`.
    """
    forms = [(tuple(tasks), tuple(lengths))]
    if fewer_tasks and len(tasks) > 1:
        forms.append((forms[-1][0][:1], forms[-1][1]))
    if fewer_lengths and len(set(lengths)) > 1:
        forms.append((forms[-1][0], (max(lengths),)))
    for asked, at in forms:
        budget = choose_budget(
            given,
            passes=passes,
            lengths=sorted(set(at)),
            num_tasks=len(asked),
            share=share,
            every=every,
            max_steps=max_steps,
        )
        if budget.ends is None or budget.ends <= _ENDS * share:
            break
    left_out = [task.name for task in tasks if task not in asked] + [f"{n} tokens" for n in lengths if n not in at]
    note = f"left out to keep the cost near share={share:.2%} of so short a training: {', '.join(left_out)}"
    return Questions(asked, at, budget, (note,) if left_out else ())


def affordable(*, spent: float, took: float, since_last: float, elapsed: float, share: float) -> bool:
    """Whether a measurement may be made now: it and the last one, with all so far, take at most `share` of the time.

    Args:
        spent: seconds that samples and measurements took so far.
        took: seconds that one takes.
        since_last: seconds since the last one; they are at least `took / share` apart.
        elapsed: seconds since the training began.
        share: of the time, 0 to 1.
    """
    return spent + 2 * took <= share * elapsed and took <= share * since_last
