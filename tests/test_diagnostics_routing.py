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
    halved = replace(before, values=before.values / 2, last_query=before.last_query / 2)
    marks = {"needle": (4, 7), "one": 20}
    picture = routing_picture({"before": before, "after": halved, "restored": before}, marks=marks)
    ratio = picture.log_ratio
    assert ratio is not None
    assert bool(ratio[0, 1:].isnan().all())  # no query sees later tokens
    torch.testing.assert_close(ratio[~ratio.isnan()], torch.full((36,), math.log(2)))
    exact = full_attention(model, input_ids)[2][0, 0, -1]
    torch.testing.assert_close(before.last_query, exact, rtol=1e-4, atol=1e-6)
    assert picture.received("before", "needle") == pytest.approx(float(exact[4:7].sum()), rel=1e-4)
    assert picture.received("before", "one") == pytest.approx(float(exact[20]), rel=1e-4)
    assert picture.received("after", "needle") == pytest.approx(picture.received("before", "needle") / 2)
    share = f"before {exact[4:7].sum():.3f}, after {exact[4:7].sum() / 2:.3f}"
    assert f"to needle (tokens 4 to 6): {share}" in str(picture) and "one (token 20): " in str(picture)
    assert "+0.69" in str(picture)
    data = picture.to_dict()
    assert data["log_ratio"][0][1] is None and data["marks"] == {"needle": [4, 7], "one": [20, 21]}
    assert data["received"]["needle"]["after"] == picture.received("after", "needle")
    assert routing_picture({"": before}).log_ratio is None


def test_the_picture_shows_the_marks(tmp_path: Path) -> None:
    model, input_ids = sharpened(build("lfm2")), example_inputs("lfm2")["input_ids"]
    state = attention_map(model, input_ids, layer=2, head=0)
    states = {"before": state, "after": state, "restored": state}
    plain = routing_picture(states).plot(tmp_path / "four.png")
    assert len(plain.axes) == 4 + 2  # panels and their colour bars
    picture = routing_picture(states, marks={"needle": (4, 7), "hay": (5, 8), "question": (20, 24)})
    figure = picture.plot(tmp_path / "marked.png")
    assert len(figure.axes) == 8 + 2  # below each panel what the last token attends to
    for axes in figure.axes[:4]:
        texts = {text.get_text(): text for text in axes.texts}
        assert list(texts) == ["needle", "hay", "question"]
        heights = [texts[name].xyann[1] for name in texts]
        assert heights[0] == heights[2] < heights[1]  # names that would cover each other stand in rows
        bars = [tuple(line.get_xdata()) for line in axes.lines]
        assert (4, 7) in bars and (20, 24) in bars
    strip = figure.axes[4]
    assert f"needle {picture.received('before', 'needle'):.1%}" in strip.get_title()
    assert picture.plot().get_size_inches()[1] > plain.get_size_inches()[1]


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
    for mark in (24, -1, (20, 25), (5, 5)):
        with pytest.raises(ValueError, match="marks outside"):
            routing_picture({"a": good}, marks={"x": mark})
    with pytest.raises(ValueError, match="at least one map"):
        routing_picture({})
