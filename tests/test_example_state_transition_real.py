"""The parts of examples/state_transition_real.py that need neither its downloads nor the real model."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.convert import add_state_transition

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from state_transition_support import costs, evicting, rows, trace_loss

VOCABULARY, START, END = 60, 60, 61
PROMPT, PLACES = 5, 12


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def trace(*step_lengths: int) -> trace_loss.MarkedTrace:
    rng = random.Random(0)
    ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
    for length in step_lengths:
        ids += [START, *(rng.randrange(VOCABULARY) for _ in range(length)), END]
    return trace_loss.MarkedTrace(tuple(ids), PROMPT, (START,), END)


@pytest.mark.parametrize("kind", [evicting.EvictingLayer, evicting.HeavyHitterLayer])
def test_evicting_token_by_token_and_in_one_pass_are_the_same(model, kind) -> None:
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    attention = {number: layer.self_attn for number, layer in enumerate(model.model.layers)}
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        with evicting.evicting_cache(model, attention, kind, PLACES) as cache:
            one_by_one = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(40)]
        with evicting.evicting_in_one_pass(model, kind, PLACES, 40) as arguments:
            at_once = model(ids, use_cache=False, **arguments).logits
        with evicting.evicting_in_one_pass(model, kind, 40, 40) as arguments:
            all_kept = model(ids, use_cache=False, **arguments).logits
    assert all(layer.keys.shape[-2] == PLACES for layer in cache.layers)
    torch.testing.assert_close(torch.cat(one_by_one, 1), at_once, rtol=0, atol=1e-3)
    torch.testing.assert_close(all_kept, full, rtol=0, atol=1e-3)
    assert (at_once - full).abs().max() > 1  # what was dropped mattered


def test_heavy_hitters_keep_what_was_attended_to_most_and_the_last(model) -> None:
    layer = evicting.HeavyHitterLayer(4)
    places = torch.arange(6.0)
    weights = torch.tensor([0.0, 5.0, 1.0, 4.0, 0.0, 0.0]).expand(1, 2, 1, 6)  # two heads of queries share one of keys
    layer.update(places.expand(1, 1, 6)[..., None], places.expand(1, 1, 6)[..., None])
    layer.evict(weights)
    assert layer.keys.flatten().tolist() == [1, 3, 4, 5] and layer.scores.flatten().tolist() == [10, 8, 0, 0]
    assert layer.get_seq_length() == 6
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        layer.evict(None)


def test_losses_are_those_of_words_however_the_text_is_read(model) -> None:
    one = trace(6, 9, 4)
    assert one.num_steps == 3 and one.longest_step == 11 and one.plain.shape == (1, PROMPT + 6 + 9 + 4)
    plain = trace_loss.loss_by_steps(trace_loss.plain_reading(model), [one, trace(3)])
    assert set(plain["trace_steps"]) == {"1", "3"} and set(plain["in_step"]) == {"1", "2", "3"}
    logits = model(one.plain).logits[0, PROMPT - 1 : -1].detach()
    wanted = torch.nn.functional.cross_entropy(logits, one.plain[0, PROMPT:])
    assert plain["trace_steps"]["3"] == pytest.approx(float(wanted), rel=1e-5)
    for kind in (evicting.EvictingLayer, evicting.HeavyHitterLayer):
        read = trace_loss.evicting_reading(model, kind)
        assert trace_loss.loss_by_steps(read, [trace(6)])["all"] == pytest.approx(
            trace_loss.loss_by_steps(trace_loss.plain_reading(model), [trace(6)])["all"], rel=1e-4
        )  # prompt and longest step are the whole text
        assert trace_loss.loss_by_steps(read, [one])["all"] != pytest.approx(plain["trace_steps"]["3"], rel=1e-4)


def test_forgetting_finished_steps_matters_once_the_path_is_read(model) -> None:
    one = trace(6, 9, 4)
    transition = add_state_transition(model, StateTransitionConfig(start_token_ids=(START,), end_token_id=END))
    whole, forgetful = trace_loss.marked_reading(model), trace_loss.forgetful_reading(model)
    with torch.no_grad():
        torch.testing.assert_close(whole(one), forgetful(one), rtol=0, atol=1e-3)  # a fresh path adds nothing
        for path in transition.paths.values():
            torch.nn.init.ones_(path.multiplier)
        with_state, without = whole(one), forgetful(one)
    torch.testing.assert_close(with_state[:6], without[:6], rtol=0, atol=1e-3)  # nothing to forget in the first step
    assert (with_state[6:] - without[6:]).abs().max() > 0.1


def test_costs_count_what_is_held(model) -> None:
    ids = torch.randint(VOCABULARY, (1, 20))
    attention = {number: layer.self_attn for number, layer in enumerate(model.model.layers)}
    settings = {"layers": (0, 1), "prompt": 5, "timed": 4}
    full = costs.reading_cost(model, DynamicCache(config=model.config), ids, **settings)
    with evicting.evicting_cache(model, attention, evicting.EvictingLayer, PLACES) as cache:
        evicted = costs.reading_cost(model, cache, ids, **settings)
    per_place = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    assert (full.kv_bytes, evicted.kv_bytes) == (20 * per_place, PLACES * per_place)
    assert full.state_bytes == 0 and full.ms_per_token > 0
    assert full.best.tolist() == model(ids).logits[0].argmax(-1).tolist()


def test_rows_are_batched_by_length_and_read_without_marks() -> None:
    texts = Dataset.from_list(
        [{"input_ids": [1] * n + [START, 2, END], "labels": [-100] * n + [START, 2, END]} for n in range(1, 11)]
    )
    batched = rows.in_like_batches(texts, 2, seed=0)
    lengths = [len(ids) for ids in batched["input_ids"]]
    assert sorted(lengths) == list(range(4, 14)) != lengths
    assert all(abs(a - b) == 1 for a, b in zip(lengths[::2], lengths[1::2], strict=True))
    plain = rows.without_marks(texts, (START, END))
    assert plain[2] == {"input_ids": [1, 1, 1, 2], "labels": [-100, -100, -100, 2]}
