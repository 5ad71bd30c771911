"""What a probe says before and after a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routeguard.recall.probe_budget import FEWEST, ProbeBudget
from routeguard.recall.probe_failures import Failures
from routeguard.recall.result import RecallResult


def opening(
    tasks: Sequence[str],
    lengths: Sequence[int],
    budget: ProbeBudget,
    *,
    every: int | None,
    share: float,
    trained_tokens: int | None,
    notes: Sequence[str] = (),
) -> str:
    """What will be measured, how often, and what a reader should know.

    Args:
        tasks, lengths: what is asked.
        budget: how many samples of each, and what that costs.
        every, share: as given to the probe.
        trained_tokens: the training length; None where the rows do not tell it.
        notes: about the haystack.
    """
    often = f"every {every} steps" if every else f"as often as {share:.0%} of the time allows"
    tokens = ", ".join(str(length) for length in sorted(set(lengths)))
    lines = [
        f"routeguard: recall probe: {', '.join(tasks)} at {tokens} tokens, {budget.num_samples} samples "
        f"each{' (chosen)' if budget.chosen else ''}, {often}, and before and after the training",
        f"  {_cost(tasks, lengths, budget, every, share)}",
    ]
    if trained_tokens is not None and max(lengths) <= trained_tokens:
        lines.append(f"  note: no length beyond the {trained_tokens} tokens trained on, where recall is lost first")
    return "\n".join([*lines, *(f"  note: {note}" for note in notes)])


def nothing_recalled(first: Mapping[int, float]) -> str | None:
    """What to say where the first accuracies, by length, are all zero: such a probe cannot see a loss."""
    if any(first.values()):
        return None
    return (
        "routeguard: recall probe: nothing was recalled at the first measurement, so no loss can show; ask what the "
        "model can do before the training (tasks=, lengths=), or leave the probe out"
    )


def closing(
    results: Mapping[int, RecallResult],
    spent: float,
    total: float,
    failures: Failures,
    earlier: Mapping[int, RecallResult] | None = None,
) -> str:
    """What was measured, what it cost, and what failed.

    Args:
        results: by step.
        earlier: of the same run before it was resumed, by step; none by default.
        spent: seconds that making samples and all measurements took, failed ones too.
        total: seconds since the training began.
        failures: what went wrong.
    """
    cost = f"{spent:.1f} s of {total:.1f} s, {spent / max(total, 1e-9):.1%} of the training"
    lines = [f"routeguard: recall probe: {len(results)} measurements and their samples ({cost})"]
    if results:
        run = {**(earlier or {}), **results}
        first, last = run[min(run)], run[max(run)]
        fell = (f"{first.accuracy(length=n):.2f} to {last.accuracy(length=n):.2f} at {n} tokens" for n in first.lengths)
        lines[0] += f"; recall from step {min(run)} to {max(run)}: {', '.join(fell)}"
    if failures.found:
        lines.append(f"  {failures}")
    return "\n".join(lines)


def _cost(tasks: Sequence[str], lengths: Sequence[int], budget: ProbeBudget, every: int | None, share: float) -> str:
    if budget.ends is None:
        return "cost: not known, since the rows of the training data tell no length; the summary at the end will say"
    text = f"cost: the first and the last take about {budget.ends:.2%} of the training (estimated from tokens)"
    if budget.total is not None:
        text += f", all of them {budget.total:.2%} with every={every}"
    if max(budget.ends, budget.total or 0) <= share:
        return text
    cuts = {
        "fewer samples": not budget.chosen and budget.num_samples > FEWEST,
        "fewer tasks": len(tasks) > 1,
        "fewer lengths": len(set(lengths)) > 1,
        "less often (every=)": (budget.total or 0) > budget.ends,
    }
    possible = [cut for cut, is_possible in cuts.items() if is_possible]
    if not possible:
        least = f"{budget.num_samples} samples of one task at one length"
        return f"{text}, above share={share:.2%} in so short a training: {least} are the least that is asked"
    few = "even " if budget.chosen and budget.num_samples == FEWEST else ""
    cost = f"{few}{budget.num_samples} samples each cost more than share={share:.2%}"
    return f"{text}; {cost}: ask {', '.join(possible)}, or train longer"
