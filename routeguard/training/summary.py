"""What the guard says before the first step: what it holds, how, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routeguard.protect.held import Held
from routeguard.protect.modes import L2SP, Anchor, AtEnd, Average, Freeze, LowLR, Protection
from routeguard.routes.collection import Routes
from routeguard.routes.describe import format_bytes
from routeguard.routes.wording import plural_of


def summarise(
    routes: Routes,
    held: Sequence[Held],
    protect: Protection,
    restore: AtEnd | None,
    *,
    learning_rate: float,
    copy_bytes: int,
    pulled: str = "",
    reference_origin: str,
    notes: Sequence[str] = (),
    obstacles: Mapping[int, str],
) -> str:
    """The summary as text.

    `copy_bytes` are the device bytes of the kept start; `pulled` says how much L2SP pulls; `notes` are about
    a named start; `obstacles` say where the logit form stops.
    """
    moving = [h for h in held if h.part != "base"]
    held_things = plural_of(route.role for route in routes)
    dtypes = sorted({str(h.parameter.dtype).removeprefix("torch.") for h in held}) or ["none"]
    lines = [
        f"routeguard: {_action(protect, restore, learning_rate, held_things)}",
        f"  full attention: layers {', '.join(map(str, routes.layers))} of {len(routes.layer_kinds)} "
        f"({routes.model_type})",
        f"  covered: {len(routes.parameters)} tensors, {routes.num_parameters:,} parameters, "
        f"{format_bytes(routes.num_bytes)}, {routes.share:.2%} of the model, {', '.join(dtypes)}",
    ]
    if pulled:
        lines.append(f"  pulled: {pulled}")
    partial = [h for h in held if h.rows is not None]
    if partial:
        rows = sum(stop - start for h in partial for start, stop in h.rows or ())
        lines.append(
            f"  by row: {len(partial)} tensors are held in part ({rows} rows); their other rows train as configured"
        )
    if moving:
        parts = ", ".join(
            f"{sum(h.part == part for h in moving)} {part}" for part in dict.fromkeys(h.part for h in moving)
        )
        lines.append(f"  adapters: the base is frozen, what is guarded is {parts}")
    if not any(h.trainable for h in held) and not isinstance(protect, Freeze):
        lines.append(f"  note: no routing parameter is trainable, so {held_things} cannot move")
    lines.append(
        f"  start: {reference_origin}"
        + (f"; its copy on the device takes {format_bytes(copy_bytes)}" if copy_bytes else "; no copy is needed")
    )
    lines += [f"  note: {note}" for note in (*notes, *routes.notes)]
    if obstacles:
        reasons = sorted(set(obstacles.values()))
        lines.append(
            f"  drift of the logits is not measured in {len(obstacles)} layers: {'; '.join(reasons)} (factors only)"
        )
    lines.append(
        "  can still move where attention looks: query/key norms and biases outside the routes, the input norm, and "
        "the residual stream that the layers below write"
    )
    return "\n".join(lines)


def _action(protect: Protection, restore: AtEnd | None, learning_rate: float, held: str) -> str:
    if isinstance(protect, Freeze):
        what = f"freeze: {held} of the full-attention layers keep their bits"
    elif isinstance(protect, LowLR):
        what = f"low_lr: {held} learn at {protect.scale} x the learning rate"
    elif isinstance(protect, Anchor):
        half = protect.half_life_steps(learning_rate)
        what = (
            f"anchor: {held} are pulled to their start, strength {protect.strength:g} "
            f"(half-life {half:.0f} steps at {learning_rate:g})"
        )
    elif isinstance(protect, L2SP):
        what = f"l2_sp: every trained weight is pulled to its start, by {protect.total:g} in all; no weight decay"
    else:
        what = f"track: {held} train freely, their drift is logged"
    if isinstance(restore, Average):
        return f"{what}; at the end every weight goes {restore.alpha:g} of the way back to its start"
    return what if restore is None else f"{what}; at the end they are restored ({restore.name})"
