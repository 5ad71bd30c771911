"""Leave-one-out importance: against layers and heads that are removed by hand, and on the demo's hybrid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from routeguard import find_routes
from routeguard.demo import evaluate
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.diagnostics.importance import head_importance, layer_importance
from tests.attention_reference import sharpened
from tests.zoo.build import build, example_inputs

HEAD_DIM = 16


def last_logit(model: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=example_inputs("lfm2")["input_ids"], use_cache=False).logits[0, -1, 7])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_layers_and_heads_against_zeroed_output_weights(attention: str) -> None:
    model = sharpened(build("lfm2"))
    model.set_attn_implementation(attention)
    full = last_logit(model)
    layers, heads = layer_importance(model, last_logit), head_importance(model, last_logit)
    assert len(layers.ranking) == 2 and len(heads.ranking) == 8
    for entry in (*layers.ranking, *heads.ranking):
        other = sharpened(build("lfm2"))
        weight = other.model.layers[entry.layer].self_attn.out_proj.weight.data
        if entry.head is None:
            weight.zero_()
        else:
            weight[:, entry.head * HEAD_DIM : (entry.head + 1) * HEAD_DIM] = 0
        assert entry.importance == pytest.approx(full - last_logit(other), abs=1e-5)
    assert max(abs(entry.importance) for entry in heads.ranking) > 1e-4  # there was something to lose
    assert last_logit(model) == full
    assert not any(module._forward_hooks for module in model.modules())


def test_one_attention_layer_of_the_demo_carries_its_recall() -> None:
    model, tokenizer = load_model(), load_tokenizer()
    ranking = layer_importance(model, lambda m: evaluate.recall(m, tokenizer, 128, num_samples=2))
    assert ranking.full["score"] > 0.9
    assert ranking.ranking[0].importance > 0.5


def test_ranking_several_tasks_top_and_plot(tmp_path: Path) -> None:
    model = sharpened(build("lfm2"))
    ranking = layer_importance(model, lambda m: {"a": last_logit(m), "b": 2 * last_logit(m)})
    first = ranking.ranking[0]
    assert first.importance == pytest.approx(
        sum(ranking.full[task] - first.scores[task] for task in ("a", "b")) / 2, abs=1e-6
    )
    assert ranking.ranking[0].importance >= ranking.ranking[1].importance
    assert ranking.top(1) == (first.layer,) and ranking.top(2) == (2, 5)
    assert find_routes(model, layers=ranking.top(1)).layers == (first.layer,)
    assert "nothing" in str(ranking) and ranking.to_dict()["ranking"][0]["layer"] == first.layer
    ranking.plot(tmp_path / "importance.png")
    assert (tmp_path / "importance.png").exists()
    heads = head_importance(model, last_logit, layers=[5])
    assert set(heads.top_heads(4)) == {5} and heads.top_heads(4)[5] == (0, 1, 2, 3)


def test_errors() -> None:
    model = sharpened(build("lfm2"))
    ranking = layer_importance(model, last_logit)
    with pytest.raises(ValueError, match="top 3 of 2"):
        ranking.top(3)
    with pytest.raises(ValueError, match="use head_importance"):
        ranking.top_heads(1)
    with pytest.raises(ValueError, match="gave no task"):
        layer_importance(model, lambda m: {})
    names = iter("abc")
    with pytest.raises(ValueError, match=r"gave \['b'\] where it gave \['a'\]"):
        layer_importance(model, lambda m: {next(names): 1.0})
    with pytest.raises(ValueError, match="was not seen"):
        head_importance(model, lambda m: 1.0)
    assert last_logit(model) == pytest.approx(ranking.full["score"])
