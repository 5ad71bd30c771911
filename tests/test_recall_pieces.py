"""Prompts read in pieces through the model's cache: tried out first, for each task, and refused where it fails."""

from __future__ import annotations

import pytest
import torch

from routeguard import measure_recall
from tests.recall_tokenizers import characters
from tests.zoo.build import build


def test_reading_in_pieces_changes_nothing() -> None:
    model = build("llama")
    call = {"tasks": "niah_single_1", "lengths": (420,), "num_samples": 2, "insist": True}
    whole, pieces = (measure_recall(model, characters(), **call, prefill_tokens=p) for p in (None, 64))
    assert [s.nll for s in whole.scores] == pytest.approx([s.nll for s in pieces.scores], rel=1e-4)


def test_a_piece_that_holds_the_whole_row_uses_no_cache() -> None:
    """bamba's cache does not carry everything over: tried out where it is used, and not used for short rows."""
    call = {"tasks": "niah_single_1", "lengths": (420,), "num_samples": 2, "insist": True}
    model = build("bamba")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    whole, large = (measure_recall(model, characters(), **call, prefill_tokens=p) for p in (None, 420))
    assert [s.nll for s in whole.scores] == [s.nll for s in large.scores]
    for size in (419, 64):
        with pytest.raises(ValueError, match="read in pieces"):
            measure_recall(model, characters(), **call, prefill_tokens=size)


def test_reading_in_pieces_is_tried_with_each_task(monkeypatch) -> None:
    """A model that forgets its cache where a bracket stands: variable tracking has one, the noise has none."""
    model, bracket = build("llama"), characters()("(").input_ids[0]
    original = model.forward

    def forgetful(input_ids, **rest):
        if bracket in input_ids:
            rest = {name: value for name, value in rest.items() if name not in ("cache", "past_key_values")}
        return original(input_ids, **rest)

    monkeypatch.setattr(model, "forward", forgetful)
    call = {"lengths": (1800,), "num_samples": 1, "insist": True, "prefill_tokens": 64}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert measure_recall(model, characters(), tasks="niah_single_1", **call).scores
    for tasks in (["niah_single_1", "vt"], ["vt", "niah_single_1"]):
        with pytest.raises(ValueError, match="when a prompt of vt is read in pieces"):
            measure_recall(model, characters(), tasks=tasks, **call)
