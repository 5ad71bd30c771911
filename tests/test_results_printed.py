"""What a result shows when it is printed, or is the last line of a notebook's cell."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import routeguard
from routeguard import anchor, find_routes, freeze, low_lr
from routeguard.routes.wording import as_printed, first_of
from tests.loops import tiny

OTHER_TOOLS = "routeguard.integrations"  # whose modules import what is not installed here
PARTS = {"Failures"}  # printed inside other texts only


class Printer:
    def __init__(self) -> None:
        self.said = ""

    def text(self, words: str) -> None:
        self.said += words


def in_a_notebook(result: object, *, cycle: bool = False) -> str:
    """IPython's order: class by class of the MRO, first `_repr_pretty_`, then a `__repr__` of that very class."""
    for cls in type(result).__mro__:
        if "_repr_pretty_" in vars(cls):
            printer = Printer()
            vars(cls)["_repr_pretty_"](result, printer, cycle)
            return printer.said
        if "__repr__" in vars(cls):
            break
    return repr(result)


def readable_classes() -> list[type]:
    found = {}
    for info in pkgutil.walk_packages(routeguard.__path__, "routeguard."):
        if not info.name.startswith(OTHER_TOOLS):
            for value in vars(importlib.import_module(info.name)).values():
                if isinstance(value, type) and value.__module__ == info.name and "__str__" in vars(value):
                    found[value.__name__] = value
    return [cls for name, cls in found.items() if name not in PARTS and not issubclass(cls, BaseException)]


def test_every_class_that_prints_as_text_does_so_in_a_notebook() -> None:
    classes = readable_classes()
    some = {"Routes", "LoraCoverage", "RecallResult", "RestoreReport", "VerifyReport", "GateReport", "StateTransition"}
    assert some <= {cls.__name__ for cls in classes}
    without = [cls.__name__ for cls in classes if vars(cls).get("_repr_pretty_") is not as_printed]
    assert not without


def test_a_notebook_shows_the_text_and_not_the_dataclass() -> None:
    routes = find_routes(tiny())
    assert in_a_notebook(routes) == str(routes) != repr(routes)
    assert in_a_notebook(routes, cycle=True) == "..."
    assert in_a_notebook(routes[0]) == repr(routes[0])  # the control: a class without a text of its own


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_what_protects_a_plain_loop_says_so_in_a_sentence() -> None:
    model = tiny("qwen3_next")  # its queries share a tensor with the output gate
    frozen = freeze(model, find_routes(model))
    assert str(frozen) == "freeze holds 1 whole tensors, rows of 1 tensors"
    assert str(freeze(model, find_routes(model))).endswith("rows of 1 tensors, 1 that did not train before")
    model = tiny()
    groups = low_lr(optimizer_of(model), model, find_routes(model), scale=0.2)
    held = len({route.parameter for route in find_routes(model)})
    assert str(groups) == f"low_lr: {held} routing tensors in groups 1 of AdamW, at 0.2 x the learning rate of the rest"
    model = tiny()
    pull = anchor(optimizer_of(model), model, find_routes(model), strength=50)
    assert str(pull).startswith(f"anchor: {held} routing tensors in groups 1 of AdamW, pulled to their start")
    assert str(pull).endswith("with strength 50")
    for result in (frozen, groups, pull):
        assert in_a_notebook(result) == str(result)
    routing = [p for name, p in model.named_parameters() if name in {r.parameter for r in find_routes(model)}]
    alone = low_lr(torch.optim.AdamW(routing, lr=1e-3), model, find_routes(model))
    assert str(alone).endswith("the optimizer has no others")


@pytest.mark.parametrize(
    ("names", "noun", "text"),
    [(["a"], "", "a"), (["a"], "tensors", "a"), (["a", "b"], "", "a (and 1 more)"),
     (["a", "b", "c"], "tensors", "a (and 2 more tensors)")],
)  # fmt: skip
def test_the_first_of_some_names(names: list[str], noun: str, text: str) -> None:
    assert first_of(names, noun) == text


def test_a_refusal_counts_no_more_where_there_are_none() -> None:
    model = tiny("qwen3_next")
    with pytest.raises(ValueError, match=r"q_proj\.weight holds routing rows beside other rows"):
        routeguard.param_groups(model, lr=1e-3, routing_scale=0.1)
