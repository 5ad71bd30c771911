"""How a run is put into words and numbers, for the page and the model card alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from routeguard.recall.result import Cell, RecallResult
from routeguard.report.run import RunReport
from routeguard.restoration.average_report import AverageReport
from routeguard.routes.collection import ROUTING_ROLES
from routeguard.routes.describe import format_bytes
from routeguard.routes.wording import plural_of
from routeguard.training.coverage import Coverage

T = TypeVar("T")

NOT_RECORDED = "not recorded"
_PROTECTIONS = {
    "freeze": "freeze: {held} did not train",
    "low_lr": "low_lr: {held} learned at {scale:g} x the learning rate",
    "anchor": "anchor: {held} were pulled to their start with strength {strength:g}",
    "l2_sp": "l2_sp: every trained weight was pulled to its start, by {total:g} in all",
    "track": "track: {held} trained freely, their drift was measured",
}


def is_protected(run: RunReport) -> bool:
    """Whether something was done for routing: more than tracking it, or a restore that is on record."""
    held = run.state is not None and run.state.protect.get("mode") != "track"
    return held or run.restore is not None


def summary(run: RunReport) -> str:
    """What kind of run it was, in one sentence."""
    roles = ROUTING_ROLES if run.state is None else run.state.roles
    what = f"The {plural_of(roles)} of the full-attention layers"
    if is_protected(run):
        decides = ", which decide how far back this model looks," if set(roles) == set(ROUTING_ROLES) else ""
        return f"{what}{decides} were guarded during fine-tuning."
    if run.state is not None:
        return f"{what} were watched during fine-tuning, and not protected."
    return "No guard's settings are on record; what follows was measured during fine-tuning."


def protection(run: RunReport) -> str:
    """The mode of protection as one sentence."""
    if run.state is None:
        return NOT_RECORDED
    mode = run.state.protect
    return (
        _PROTECTIONS[mode["mode"]].format(**mode, held=plural_of(run.state.roles))
        if mode["mode"] in _PROTECTIONS
        else str(mode)
    )


def restoration(run: RunReport) -> str:
    """What was put back or averaged at the end, or that nothing was."""
    if run.restore is not None:
        report = run.restore
        if isinstance(report, AverageReport):
            return f"every weight moved {report.alpha:g} of the way back to its start: {report.num_tensors} tensors"
        return (
            f"{report.method}: {len(report.tensors)} tensors in {len(report.layers)} layers put back from "
            f"{report.origin}; {format_bytes(report.changed_bytes)} changed"
        )
    if run.state is None:
        return NOT_RECORDED
    if run.state.restore is None:
        return "none was asked for"
    return f"{run.state.restore['mode']} was asked for, and is {NOT_RECORDED}"


def layers_held(run: RunReport) -> str:
    """Layer numbers with the model's kind and depth as far as known: "2, 5 of 6 (lfm2)"."""
    if run.state is None:
        return NOT_RECORDED
    text = ", ".join(map(str, run.state.layers))
    found = run.coverage
    if found is not None and found.num_layers is not None:
        text += f" of {found.num_layers}"
    return text if found is None or found.model_type is None else f"{text} ({found.model_type})"


def amount_held(found: Coverage | None) -> str:
    """Tensors, rows, parameters, bytes and share in one line."""
    if found is None:
        return NOT_RECORDED
    share = f"share of the model {NOT_RECORDED}" if found.share is None else f"{found.share:.2%} of the model"
    adapters = f"; with {found.num_adapter_tensors} tensors of an adapter on them" if found.num_adapter_tensors else ""
    return (
        f"{found.num_tensors} tensors, {found.num_rows:,} rows, {found.num_parameters:,} parameters, "
        f"{format_bytes(found.num_bytes)} in {', '.join(found.dtypes)}; {share}{adapters}"
    )


def drift_at_end(run: RunReport) -> str:
    """Mean drift by role and the largest, at the last recorded step; before a restore."""
    if run.drift is None:
        return NOT_RECORDED
    return f"{run.drift.samples[-1]}{', before what was done at the end' if run.restore is not None else ''}"


def number(value: float | None) -> str:
    """Four digits; what is no number is said to be none."""
    if value is None:
        return NOT_RECORDED
    if not math.isfinite(value):
        return "not a number"
    return "0" if value == 0 else f"{value:.4g}"


def cell_text(cell: Cell) -> str:
    """A share with its 95 % interval: "0.95 [0.76–0.99]"."""
    return f"{cell.accuracy:.2f} [{cell.low:.2f}–{cell.high:.2f}]"


def by_length(result: RecallResult) -> dict[int, Cell]:
    """Recall of all tasks together by length in tokens."""
    return {int(cell.label[0]): cell for cell in result.by_length()}


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most that many items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
