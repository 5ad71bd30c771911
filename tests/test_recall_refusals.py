"""measure_recall: what it refuses before it measures."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest

from routeguard import measure_recall
from routeguard.demo.model import load_model, load_tokenizer
from tests.recall_tokenizers import characters
from tests.standins import hypenet


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (5000,)}, "5000 tokens are beyond the 4096 positions"),
        ({"lengths": (20,)}, "length 20 is too short for demo_needles"),
        ({"lengths": ()}, "give lengths"),
        ({"lengths": 4096}, r"lengths=4096: give a sequence .*lengths=\(4096,\)"),
        ({"lengths": "4k"}, "lengths='4k': give a sequence"),
        ({"lengths": ("4k",)}, "length '4k' is not a whole number"),
        ({"lengths": (4096.5,)}, "length 4096.5 is not a whole number"),
        ({"lengths": (512.0,)}, "length 512.0 is not a whole number"),
        ({"lengths": (True,)}, "length True is not a whole number"),
        ({"lengths": (512, -1)}, "give lengths of at least 1 token"),
        ({"batch_tokens": 0}, "batch_tokens=0: give a whole number"),
        ({"num_samples": 0}, "num_samples=0: give a whole number"),
        ({"prefill_tokens": 0}, "prefill_tokens=0: give a whole number"),
        ({"depths": (0.5, 1.5)}, "depths lie between 0"),
        ({"tasks": "demo_needles+reasoning"}, "no words for a chain of thought"),
        ({"method": "guessed"}, "no method 'guessed'"),
        ({"tasks": "niah_single_1"}, "words that this tokenizer does not know"),
        ({"method": "generated", "prefill_tokens": 8}, "method='forced' only"),
        ({"prefill_tokens": 16}, "when a prompt of demo_needles is read in pieces"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    model = load_model()
    if options.get("prefill_tokens"):  # a convolution that starts anew with every piece
        original = model.forward
        model.forward = types.MethodType(
            lambda self, input_ids, cache=None, past_key_values=None, **rest: original(input_ids, **rest), model
        )
    settings = {"tasks": "demo_needles", "lengths": (128,), "num_samples": 1, **options}
    with pytest.raises(ValueError, match=message):
        measure_recall(model, load_tokenizer(), **settings)


def test_numpys_whole_numbers_are_lengths() -> None:
    result = measure_recall(load_model(), load_tokenizer(), tasks="demo_needles", lengths=np.array([64]), num_samples=1)
    assert json.dumps(result.to_dict()["settings"]["lengths"]) == "[64]"


def test_a_model_that_cannot_generate_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot generate; use method='forced'"):
        measure_recall(hypenet(), characters(), tasks="niah_single_1", lengths=(420,), method="generated")
