"""The attention functions of transformers' models, watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

# How models look a function up. Releases before 5 know the index only, and never ask it for the eager function.
_LOOK_UPS = ("get_interface", "__getitem__")
_EAGER = "eager_attention_forward"


@contextmanager
def watched_attention_functions(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Let every attention function that transformers' models call go through `wrap`; put back on leaving.

    These are what the table of attention functions hands out and, where models call the eager function of their own
    file without asking the table (before transformers 5), those functions. Does nothing if transformers' models are
    not loaded: then no model of theirs can run.

    Args:
        wrap: gets a function and returns what the model shall call; one function may go through it twice.
    """
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    with ExitStack() as stack:
        for name in _LOOK_UPS:
            if hasattr(interface, name):
                stack.enter_context(_replaced(interface, name, _wrapped(getattr(interface, name), wrap)))
        if interface is not None and not hasattr(interface, "get_interface"):
            for module in list(sys.modules.values()):
                if _EAGER in getattr(module, "__dict__", ()):
                    stack.enter_context(_replaced(module, _EAGER, wrap(vars(module)[_EAGER])))
        yield


def _wrapped(look_up: Callable[..., Any], wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda table, *args, **kwargs: wrap(look_up(table, *args, **kwargs))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a class or module with another value; one that was inherited is inherited again."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
