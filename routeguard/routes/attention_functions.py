"""transformers' table of attention functions, watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# How models look a function up: releases before 5 know the index only.
_LOOK_UPS = ("get_interface", "__getitem__")


@contextmanager
def watched_attention_functions(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Let everything that the tables of attention functions hand out go through `wrap`; put back on leaving.

    Does nothing if transformers' models are not loaded: then no model of theirs can run.

    Args:
        wrap: gets what was looked up and returns what the model shall call; one look-up may go through it twice.
    """
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    look_ups = [name for name in _LOOK_UPS if hasattr(interface, name)]
    own = {name: vars(interface)[name] for name in look_ups if name in vars(interface)}
    for name in look_ups:
        setattr(interface, name, _wrapped(getattr(interface, name), wrap))
    try:
        yield
    finally:
        for name in look_ups:
            if name in own:
                setattr(interface, name, own[name])
            else:
                delattr(interface, name)


def _wrapped(look_up: Callable[..., Any], wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda table, *args, **kwargs: wrap(look_up(table, *args, **kwargs))
