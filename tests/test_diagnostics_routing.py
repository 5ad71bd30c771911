"""Routing pictures against full attention matrices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from routeguard.diagnostics.routing_picture import attention_map, routing_picture
from tests.attention_reference import full_attention, sharpened
from tests.zoo.build import build, example_inputs


@pytest.mark.parametrize("name", ["lfm2", "gpt_oss", "inkling_text", "bloom"])
@pytest.mark.parametrize("cells", [24, 5])
def test_cells_are_means_of_the_full_matrix(name: str, cells: int) -> None:
    model, input_ids = sharpened(build(name)), example_inputs(name)["input_ids"]
    for layer, matrix in full_attention(model, input_ids).items():
        for head in (0, 3):
            found = attention_map(model, input_ids, layer=layer, head=head, num_cells=cells)
            edges = found.edges
            assert edges[0] == 0 and edges[-1] == 24 and len(edges) == cells + 1
            expected = torch.stack(
                [
                    torch.stack([matrix[0, head, a:b, c:d].mean() for c, d in itertools.pairwise(edges)])
                    for a, b in itertools.pairwise(edges)
                ]
            )
            torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-6)
        others = attention_map(model, input_ids, layer=layer, head=1, num_cells=cells).values
        assert not torch.allclose(others, found.values, rtol=1e-2)


def test_log_ratio_marks_and_picture(tmp_path: Path) -> None:
    model, input_ids = sharpened(build("lfm2")), example_inputs("lfm2")["input_ids"]
    before = attention_map(model, input_ids, layer=2, head=0, num_cells=8)
    halved = replace(before, values=before.values / 2)
    picture = routing_picture({"before": before, "after": halved, "restored": before}, marks={"needle": 4})
    ratio = picture.log_ratio
    assert ratio is not None
    assert bool(ratio[0, 1:].isnan().all())  # no query sees later tokens
    torch.testing.assert_close(ratio[~ratio.isnan()], torch.full((36,), math.log(2)))
    assert picture.received("before", "needle") == pytest.approx(float(before.values[-1, 1]) * 3)
    assert picture.received("after", "needle") == pytest.approx(picture.received("before", "needle") / 2)
    assert "needle (token 4)" in str(picture) and "+0.69" in str(picture)
    assert picture.to_dict()["log_ratio"][0][1] is None
    assert len(picture.plot(tmp_path / "four.png").axes) == 4 + 2  # panels and their colour bars
    assert routing_picture({"": before}).log_ratio is None


def test_errors() -> None:
    model, input_ids = sharpened(build("lfm2")), example_inputs("lfm2")["input_ids"]
    good = attention_map(model, input_ids, layer=2, head=0)
    with pytest.raises(ValueError, match="heads 0 to 3, asked for 4"):
        attention_map(model, input_ids, layer=2, head=4)
    with pytest.raises(ValueError, match="one prompt"):
        attention_map(model, input_ids.expand(2, -1), layer=2, head=0)
    with pytest.raises(ValueError, match="layer"):
        attention_map(model, input_ids, layer=0, head=0)
    with pytest.raises(ValueError, match="the maps differ"):
        routing_picture({"a": good, "b": attention_map(model, input_ids, layer=5, head=0)})
    with pytest.raises(ValueError, match="marks outside"):
        routing_picture({"a": good}, marks={"x": 24})
    with pytest.raises(ValueError, match="at least one map"):
        routing_picture({})
