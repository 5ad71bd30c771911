"""The tasks by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from routeguard.recall.demo_needles import DemoNeedles
from routeguard.recall.needles import NeedleTask
from routeguard.recall.reasoning import SUFFIX, AfterReasoning
from routeguard.recall.task import Task
from routeguard.recall.variables import VariableTask

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        NeedleTask("niah_single_1", filling="noise"),
        NeedleTask("niah_single_2"),
        NeedleTask("niah_single_3", values="uuids"),
        NeedleTask("niah_multikey_1", num_keys=4),
        NeedleTask("niah_multikey_2", filling="needles"),
        NeedleTask("niah_multikey_3", filling="needles", keys="uuids", values="uuids"),
        NeedleTask("niah_multivalue", num_values=4),
        NeedleTask("niah_multiquery", num_keys=4, num_queries=4),
        VariableTask(),
        DemoNeedles(),
    )
}
DEFAULT_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_2")


def find_task(task: str | Task) -> Task:
    """The task itself, or the one of that name; `NAME+reasoning` puts a chain of thought before its question.

    Raises ValueError for an unknown name, with the nearest one, and for `demo_needles+reasoning`.
    """
    if not isinstance(task, str):
        return task
    if task.endswith(SUFFIX):
        return AfterReasoning(find_task(task.removesuffix(SUFFIX)))
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=1)
        hint = f"nearest {near[0]!r}; " if near else ""
        raise ValueError(f"no recall task {task!r}; {hint}there are {', '.join(TASKS)}, each also with '{SUFFIX}'")
    return TASKS[task]


def find_tasks(tasks: str | Task | Iterable[str | Task]) -> tuple[Task, ...]:
    """Several tasks. Raises ValueError for none at all, an unknown name, and a name given twice."""
    given = [tasks] if isinstance(tasks, str) or not isinstance(tasks, Iterable) else list(tasks)
    found = tuple(find_task(task) for task in given)
    names = [task.name for task in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"recall tasks must be given, each once; got {names}")
    return found
