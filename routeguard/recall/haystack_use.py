"""Whether the chosen tasks use the haystack, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from routeguard.recall.haystack import Haystack, as_haystack
from routeguard.recall.registry import TASKS
from routeguard.recall.task import Task, uses_haystack


def chosen_haystack(source: Any, tasks: Sequence[Task]) -> Haystack:
    """The haystack of whatever was given (`as_haystack`), for these tasks.

    Raises ValueError for a haystack that none of the tasks uses, naming those that would.
    """
    if source is not None and not any(map(uses_haystack, tasks)):
        users = [name for name, task in TASKS.items() if uses_haystack(task)]
        raise ValueError(
            f"a haystack was given, and {', '.join(task.name for task in tasks)} would not use it: their text is made "
            f"of other things; leave haystack out, or ask {', '.join(users)}"
        )
    return as_haystack(source)


def haystack_origin(haystack: Haystack, tasks: Iterable[Task]) -> str | None:
    """What settings say about the haystack; None where no task uses it."""
    return haystack.origin if any(map(uses_haystack, tasks)) else None


def haystack_notes(haystack: Haystack, tasks: Sequence[Task], longest: int = 0) -> tuple[str, ...]:
    """What a reader should know about the haystack, in a sentence each.

    Args:
        haystack: the chosen one.
        tasks: those that are asked.
        longest: tokens of the longest context.
    """
    if not any(map(uses_haystack, tasks)):
        return ()
    notes = []
    without = [task.name for task in tasks if not uses_haystack(task)]
    if without and not haystack.builtin:
        notes.append(
            f"the haystack ({haystack.origin}) is not used by {', '.join(without)}, whose text is made of other things"
        )
    words = len(haystack.words)
    if haystack.repeats and longest > words:
        notes.append(f"the haystack ({haystack.origin}) has {words:,} {haystack.unit}; longer contexts repeat it")
    return (*notes, *haystack.notes)
