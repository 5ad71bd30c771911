"""Words that messages and printed results share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_PLURALS = {"query": "queries", "key": "keys", "value": "values", "output": "outputs"}


def first_of(names: Sequence[str], noun: str = "") -> str:
    """The first name, and how many more there are, if any: "q.weight (and 3 more tensors)".

    Args:
        names: at least one.
        noun: what they are, in the plural. Default: nothing.
    """
    if len(names) == 1:
        return names[0]
    return f"{names[0]} (and {len(names) - 1} more{noun and ' '}{noun})"


def plural_of(roles: Iterable[str]) -> str:
    """What roles are called in a sentence: "queries and keys", "queries", "queries, keys and values"."""
    wanted = set(roles)
    return listed([plural for role, plural in _PLURALS.items() if role in wanted])


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: "query", "query and key", "query, key and value"; "no" if there are none."""
    *others, last = [*names] or ["no"]
    return f"{', '.join(others)} and {last}" if others else last


def as_printed(result: object, printer: Any, cycle: bool) -> None:
    """`_repr_pretty_` of a result whose `str()` is made to be read: a notebook cell then shows it as `print` does.

    To be assigned in the class itself (`_repr_pretty_ = as_printed`): IPython asks each class of the MRO in turn, and
    would take a dataclass's own `__repr__` before a method that the class inherits.

    Args:
        printer: IPython's pretty printer.
        cycle: whether the result is being printed already, further out.
    """
    printer.text("..." if cycle else str(result))
