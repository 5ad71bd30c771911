"""Routes and restores of single heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from routeguard import find_routes, restore, restore_checkpoint
from routeguard.routes.heads import select_heads
from tests.folders import write_pair
from tests.test_restore_checkpoint import assert_equal_models, changed_in_routing_only, reloaded
from tests.tuned import start_and_tuned, with_rows_from
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore:all .* layers of:UserWarning")
FAMILIES = ["lfm2", "qwen3_next", "gpt2", "phi3", "gpt_neox", "falcon", "llama/bias", "bloom"]


def rows(route: Any) -> list[int]:
    return [row for start, stop in route.rows or ((0, route.shape[route.dim]),) for row in range(start, stop)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_heads_share_out_the_rows(name: str) -> None:
    """The rows of all heads, one after the other, are the rows of the layer, each query row once."""
    model = build(name)
    whole = find_routes(model, roles=("query", "key", "value"))
    layer = whole.layers[-1]
    geometry = whole.geometry(layer)
    group = geometry.num_heads // geometry.num_key_value_heads
    for route in whole.select(layers=[layer]):
        parts = []
        for head in range(geometry.num_heads):
            narrowed = select_heads(whole, {layer: [head]})
            (same,) = [
                r for r in narrowed if (r.parameter, r.role, r.kind) == (route.parameter, route.role, route.kind)
            ]
            parts.append(rows(same))
        if route.role == "query":
            assert [row for part in parts for row in part] == rows(route)
        else:
            assert [row for part in parts[::group] for row in part] == rows(route)
            assert all(parts[head] == parts[head - head % group] for head in range(geometry.num_heads))
    assert (
        select_heads(whole, {layer: range(geometry.num_heads)}).num_parameters
        == whole.select(layers=[layer]).num_parameters
    )


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "gpt2", "phi3"])
def test_one_head_is_restored_in_memory_and_on_disk(name: str, tmp_path: Path) -> None:
    start, tuned = write_pair(name, tmp_path)
    layer = find_routes(start).layers[-1]
    heads = {layer: [1]}
    expected = with_rows_from(tuned, start, find_routes(start, heads=heads))
    restore_checkpoint(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "out", heads=heads)
    assert changed_in_routing_only(tmp_path / "tuned", tmp_path / "out", heads=heads) > 0
    restore(tuned, start, heads=heads)
    for parameter, value in tuned.named_parameters():
        assert torch.equal(value, expected[parameter]), parameter
    assert_equal_models(reloaded(tmp_path / "out", tuned), tuned)


def test_queries_of_one_head_alone() -> None:
    """With the queries of a head and its keys restored, that head's logits are the old ones for the same input."""
    start, _ = start_and_tuned("llama/heads")
    routes = find_routes(start, heads={0: [2]}, roles=("query",))
    (route,) = [r for r in routes if r.kind == "weight"]
    head_dim = find_routes(start).geometry(0).head_dim
    assert rows(route) == list(range(2 * head_dim, 3 * head_dim))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({}, "names no head"),
        ({2: []}, "names no head"),
        ({0: [1]}, "layer 0 has no full attention"),
        ({2: [4]}, r"has 4 query heads, 0 to 3; asked for \[4\]"),
        ({2: [-1]}, r"asked for \[-1\]"),
        ({2: 0}, r"heads=\{2: 0\} does not map.*\{2: \[0, 3\]\}"),
        ({2: "0"}, r"heads=\{2: '0'\} does not map"),
        ([2], r"heads=\[2\] does not map"),
    ],
    ids=str,
)
def test_heads_that_do_not_exist_are_refused(heads: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_routes(build("lfm2"), heads=heads)


def test_rows_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are not grouped by heads"):
        find_routes(build("deepseek_v3"), heads={0: [0]})
    start, tuned = start_and_tuned("lfm2")
    with pytest.raises(ValueError, match="QK-Pro needs the query rows"):
        restore(tuned, start, heads={2: [0]}, method="qk_pro")


def test_the_command_line_reads_heads() -> None:
    from routeguard.cli.shared import parse_heads

    assert parse_heads("3:0,2;7:1") == {3: [0, 2], 7: [1]} and parse_heads(None) is None
    assert parse_heads("3:0;3:1") == {3: [0, 1]}
    for text in ("3", "3:", "a:1", "3:0;", "3:0:1"):
        with pytest.raises(ValueError, match="is not of the form"):
            parse_heads(text)
