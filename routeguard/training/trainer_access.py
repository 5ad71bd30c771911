"""Reach the Trainer from a callback, which is never handed it."""

from __future__ import annotations

import sys
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any

TOO_EARLY = (
    "this RouteGuard is in another Trainer, which has not trained yet. Give each Trainer a guard of its own, or train "
    "the first before the second is made; guard.detach() takes the guard out of the first"
)
TOO_LATE = (
    "this RouteGuard has gone on to another Trainer and guards this one no longer. Give each Trainer a guard of its own"
)
HINT = (
    "RouteGuard could not reach its Trainer. Pass it at construction, SFTTrainer(..., callbacks=[RouteGuard(...)]), or "
    "call guard.attach(trainer) before trainer.train()"
)


def find_trainer(callback: object) -> Any | None:
    """The Trainer that is calling `callback` right now, found on the call stack, or None.

    A frame counts only if its `self` is a Trainer whose handler holds this very callback. No frame is kept.
    """
    from transformers import Trainer

    frame: FrameType | None = sys._getframe(1)
    try:
        while frame is not None:
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, Trainer) and holds(candidate, callback):
                return candidate
            frame = frame.f_back
    finally:
        del frame
    return None


def holds(trainer: Any, callback: object) -> bool:
    """Whether the trainer's handler has this very callback object."""
    handler = getattr(trainer, "callback_handler", None)
    return handler is not None and any(known is callback for known in handler.callbacks)


def resumed_folder(trainer: Any) -> Path | None:
    """The checkpoint folder that the `train()` call in progress resumes from, read off its call stack, or None."""
    frame: FrameType | None = sys._getframe(1)
    try:
        while frame is not None:
            if frame.f_locals.get("self") is trainer and "resume_from_checkpoint" in frame.f_locals:
                folder = frame.f_locals["resume_from_checkpoint"]
                return Path(folder) if isinstance(folder, (str, PathLike)) else None
            frame = frame.f_back
    finally:
        del frame
    return None


def run_first(trainer: Any, callback: object) -> None:
    """Move a callback before the reporters, so that what it changes at the end of training is what they upload."""
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [callback, *(known for known in callbacks if known is not callback)]
