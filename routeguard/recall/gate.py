"""A regression test for recall: two measurements of the same samples, before and after a training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from routeguard.recall.paired import fewest_losses, paired_bootstrap, sign_test
from routeguard.recall.result import RecallResult
from routeguard.recall.scores import SampleScore
from routeguard.routes.wording import as_printed

SCHEMA_VERSION = 1
MIN_PAIRS = 8  # below this a bootstrap of pairs says little
_Groups = dict[tuple[str | None, int], list[tuple[SampleScore, SampleScore]]]


@dataclass(frozen=True)
class GateRow:
    """One length (task None: all tasks), or one task at one length.

    Attributes:
        before, after: mean scores, 0 to 1, over the same `count` samples.
        drop: `before - after`, with `low` and `high` its two-sided 90 % bootstrap interval by default.
        num_lost, num_gained: samples whose score fell, or rose.
        p_bootstrap: share of the resamples of the pairs that show no drop.
        p_sign: exact one-sided sign test of `num_lost` against `num_gained` (McNemar's where scores are 0 or 1).
        failed: whether the drop is both large enough and significant by both tests.
    """

    task: str | None
    length_tokens: int
    count: int
    before: float
    after: float
    drop: float
    low: float
    high: float
    num_lost: int
    num_gained: int
    p_bootstrap: float
    p_sign: float
    failed: bool


@dataclass(frozen=True)
class GateReport:
    """The verdict by length, with every task at every length for reading.

    Attributes:
        rows: by length; these decide.
        by_task: by task and length; these decide only where `gate(each_task=True)`.
        max_drop: the largest drop that passes whatever its significance.
        confidence: one-sided confidence at which a drop counts.
        reasoning: reasoning scores before and after, if given; for reading only.
    """

    rows: tuple[GateRow, ...]
    by_task: tuple[GateRow, ...]
    max_drop: float
    confidence: float
    reasoning: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        return not any(row.failed for row in (*self.rows, *self.by_task))

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "kind": "recall_gate", "ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = ["recall       before   after    drop  interval        samples  lost  gained  p bootstrap  p sign"]
        for row in self.rows:
            lines.append(
                f"@{row.length_tokens:<10} {row.before:7.2f} {row.after:7.2f} {row.drop:+7.2f}  "
                f"[{row.low:+.2f}, {row.high:+.2f}]  {row.count:7}  {row.num_lost:4}  {row.num_gained:6}  "
                f"{row.p_bootstrap:11.3f}  {row.p_sign:6.3f}{'  FAILED' if row.failed else ''}"
            )
        for row in sorted(self.by_task, key=lambda row: -row.drop)[:3]:
            if row.drop >= self.max_drop:
                lines.append(
                    f"largest by task: {row.task} @{row.length_tokens}: {row.before:.2f} to {row.after:.2f}"
                    f"{'  FAILED' if row.failed else ''}"
                )
        if self.reasoning is not None:
            before, after = self.reasoning
            lines.append(f"reasoning    {before:7.2f} {after:7.2f} {before - after:+7.2f}  (not judged)")
        verdict = "passed" if self.ok else "FAILED"
        lines.append(
            f"gate {verdict}: a drop of at least {100 * self.max_drop:g} points fails where it is significant at "
            f"{100 * self.confidence:g} % by both tests"
        )
        low = [row for row in self.rows if row.before < self.max_drop - 1e-9]
        if low:
            where = ", ".join(f"@{row.length_tokens}" for row in low)
            lines.append(
                f"note: {where}: recall before was below {self.max_drop:.2f}, "
                f"so no drop of {100 * self.max_drop:g} points can show; measure tasks and lengths that BEFORE can do"
            )
        few, needed = min(row.count for row in self.rows), fewest_losses(self.confidence)
        if needed / few > self.max_drop + 1e-9:
            lines.append(
                f"note: of {few} samples at least {needed} must be lost before that is significant, which is "
                f"{100 * needed / few:.0f} points where each has one value; for {100 * self.max_drop:g} points measure "
                f"at least {math.ceil(needed / self.max_drop - 1e-9)} a length"
            )
        return "\n".join(lines)

    _repr_pretty_ = as_printed


def gate(
    before: RecallResult,
    after: RecallResult,
    *,
    max_drop: float = 0.10,
    confidence: float = 0.95,
    each_task: bool = False,
    num_resamples: int = 10_000,
    seed: int = 0,
    reasoning: tuple[float, float] | None = None,
) -> GateReport:
    """Compare two measurements of the same samples, by a paired bootstrap and an exact sign test.

    A length fails if its mean score fell by `max_drop` or more, if at most `1 - confidence` of the resamples of its
    pairs show no drop at all, and if the sign test of samples lost against samples gained is at most `1 - confidence`
    too: a bootstrap alone is too liberal where few pairs differ. With many lengths the chance that one fails by luck
    adds up.

    Args:
        before, after: measured with the same tasks, lengths, seed and tokenizer.
        max_drop: 0.10 is ten points.
        confidence: one-sided, 0.5 to 1.
        each_task: judge each task at each length too, not only each length.
        num_resamples: bootstrap resamples of the pairs.
        seed: of the bootstrap.
        reasoning: scores of your own before and after, shown beside.

    Raises ValueError if the samples are not the same, or fewer than 8 at a length, and for scores that are no numbers.
    """
    if not 0 < max_drop <= 1 or not 0.5 < confidence < 1 or num_resamples < 100:
        raise ValueError(
            f"max_drop lies above 0 and up to 1, confidence between 0.5 and 1, num_resamples from 100 on; got "
            f"{max_drop}, {confidence}, {num_resamples}"
        )
    pairs = _paired(before, after)

    def rows(label: Callable[[SampleScore], tuple[str | None, int]], *, judged: bool) -> tuple[GateRow, ...]:
        groups: _Groups = {}
        for pair in pairs:
            groups.setdefault(label(pair[0]), []).append(pair)
        found = []
        for (task, length), group in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0] or "")):
            if judged and len(group) < MIN_PAIRS:
                raise ValueError(
                    f"{len(group)} samples at length {length}{f' of {task}' if task else ''} are too few to judge; "
                    f"measure at least {MIN_PAIRS} (num_samples)"
                )
            found.append(_row(task, length, group, max_drop, confidence, num_resamples, seed, judged))
        return tuple(found)

    return GateReport(
        rows=rows(lambda score: (None, score.length_tokens), judged=True),
        by_task=rows(lambda score: (score.task, score.length_tokens), judged=each_task),
        max_drop=max_drop,
        confidence=confidence,
        reasoning=reasoning,
    )


def _paired(before: RecallResult, after: RecallResult) -> list[tuple[SampleScore, SampleScore]]:
    for name, result in (("BEFORE", before), ("AFTER", after)):
        strange = [score for score in result.scores if not 0 <= score.score <= 1]  # NaN is in no range
        if strange:
            raise ValueError(
                f"{name} has {len(strange)} scores that do not lie between 0 and 1, such as {strange[0].score} "
                f"({strange[0].task} at {strange[0].length_tokens} tokens); measure again"
            )
    first, second = ({score.key: score for score in result.scores} for result in (before, after))
    if not first or first.keys() != second.keys():
        shared = len(first.keys() & second.keys())
        names = [n for n in ("tasks", "lengths", "num_samples", "seed", "haystack", "chat", "depths", "reserve_tokens")
                 if before.settings.get(n) != after.settings.get(n)]  # fmt: skip
        why = f"they differ in {', '.join(names)}" if names else "was the tokenizer the same?"
        raise ValueError(
            f"BEFORE has {len(first)} samples, AFTER {len(second)}, and {shared} are the same: a paired comparison "
            f"needs the same samples in both ({why})"
        )
    if before.settings.get("method") != after.settings.get("method"):
        raise ValueError(
            f"BEFORE was scored {before.settings.get('method')}, AFTER {after.settings.get('method')}; "
            "score both one way"
        )
    return [(score, second[key]) for key, score in first.items()]


def _row(
    task: str | None,
    length: int,
    pairs: list[tuple[SampleScore, SampleScore]],
    max_drop: float,
    confidence: float,
    num_resamples: int,
    seed: int,
    judged: bool,
) -> GateRow:
    import numpy

    drops = numpy.array([one.score - two.score for one, two in pairs])
    bootstrap = paired_bootstrap(drops, confidence=confidence, num_resamples=num_resamples, seed=seed)
    # Rounding: a drop of exactly ten points is at least ten points.
    num_lost, num_gained = int((drops > 1e-9).sum()), int((drops < -1e-9).sum())
    p_sign = sign_test(num_lost, num_gained)
    drop = float(drops.mean())
    failed = judged and drop >= max_drop - 1e-9 and max(bootstrap.p, p_sign) <= 1 - confidence
    return GateRow(
        task=task,
        length_tokens=length,
        count=len(pairs),
        before=fmean(one.score for one, _ in pairs),
        after=fmean(two.score for _, two in pairs),
        drop=drop,
        low=bootstrap.low,
        high=bootstrap.high,
        num_lost=num_lost,
        num_gained=num_gained,
        p_bootstrap=bootstrap.p,
        p_sign=p_sign,
        failed=failed,
    )
