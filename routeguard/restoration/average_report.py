"""What averaging a tuned model with its start did. Neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from routeguard.routes.wording import as_printed

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class AverageReport:
    """What `average` or `average_checkpoint` did. `str()` prints it, `to_dict()` is JSON-serialisable.

    Attributes:
        alpha: the fraction of the way back to the start.
        origin: where the start came from.
        num_tensors: tensors averaged.
        num_entries: their entries.
        drift_before: ‖W − W₀‖ / ‖W₀‖ over all of them before; None for adapters, whose start has no size.
        num_16_bit: entries of 16-bit types, which were rounded at random, right on average.
        output: the folder that was written; None in memory.
        notes: what was left as it was, and why.
    """

    alpha: float
    origin: str
    num_tensors: int
    num_entries: int
    drift_before: float | None
    num_16_bit: int = 0
    output: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def __str__(self) -> str:
        drift = "" if self.drift_before is None else f"; relative drift was {self.drift_before:.3g}"
        lines = [
            f"averaged {self.num_tensors} tensors ({self.num_entries:,} entries): {self.alpha:g} of the way back to "
            f"{self.origin}{drift}"
        ]
        if self.num_16_bit:
            lines.append(
                f"note: {self.num_16_bit:,} entries are of 16 bits, too coarse for small steps: each was rounded at "
                "random to one of its two neighbours, so that the mean is right (float32 weights would be exact)"
            )
        lines += [f"note: {note}" for note in self.notes]
        if self.output is not None:
            lines.append(f"wrote {self.output}; the tuned checkpoint is as it was")
        return "\n".join(lines)

    _repr_pretty_ = as_printed


def without_start(missing: Sequence[str], origin: str, *, insist: bool, total: int) -> tuple[str, ...]:
    """A note about tensors that the start lacks or has in another shape. Raises ValueError unless `insist`."""
    if not missing:
        return ()
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    text = f"{len(missing)} of {total} tensors are not in {origin}, or in another shape: {', '.join(missing[:4])}{more}"
    if len(missing) == total:
        raise ValueError(f"{text}. Give the checkpoint that the tuning started from")
    if not insist:
        raise ValueError(
            f"{text}. Averaging the others alone would mix two models; give the checkpoint that the tuning started "
            "from, or insist (insist=True, --insist) to leave those as tuned"
        )
    return (f"{text}: left as tuned",)
