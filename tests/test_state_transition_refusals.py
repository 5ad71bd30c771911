"""What cannot be converted, and what a converted model cannot read: refused, and undone."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from routeguard.state_transition.convert import add_state_transition
from routeguard.state_transition.running import Running
from routeguard.state_transition.step_tokens import StepTokens
from tests.state_transition_texts import (
    TWO_TEXTS,
    config,
    converted,
    in_turn,
    layout_of,
    text,
    whole,
)
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")


def test_caches_of_transformers_4_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicLayer, "get_mask_sizes", lambda self, cache_position: (0, 0))
    model = build("llama")
    with pytest.raises(ValueError, match="needs the caches of transformers 5"):
        add_state_transition(model, config())
    monkeypatch.undo()
    add_state_transition(model, config())  # nothing was left behind


def test_embeddings_of_each_layer_do_not_know_step_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 looks tokens up a second time, in a table of the base vocabulary's size."""
    model = converted("gemma4_text").model
    logits, _ = in_turn(model, TWO_TEXTS, 22)
    torch.testing.assert_close(logits, whole(model, TWO_TEXTS), rtol=1e-3, atol=2e-4)
    monkeypatch.setattr(StepTokens, "before_other", lambda self, module, args: None)
    with pytest.raises(ValueError, match="which was undone: index out of range"):
        add_state_transition(build("gemma4_text"), config())


def test_what_cannot_be_converted() -> None:
    for name, why in (
        ("deepseek_v3", "keys and values are not projections of their own"),
        ("zamba2", "shares its attention module"),
        ("falcon_h1", "keep more than keys and values"),
    ):
        model = build(name)
        with pytest.raises(ValueError, match=why):
            add_state_transition(model, config())
        assert getattr(model, "state_transition", None) is None and all(p.requires_grad for p in model.parameters())
    model = build("lfm2")
    with pytest.raises(ValueError, match="layer"):
        add_state_transition(model, config(layers=(0,)))
    with pytest.raises(ValueError, match="Linear does not name its output_embeddings: not supported"):
        add_state_transition(torch.nn.Linear(2, 2), config())
    with pytest.raises(ValueError, match=r"must follow it without a gap; got \[97, 98\]"):
        add_state_transition(model, config(start_token_ids=(97,)))
    with pytest.raises(ValueError, match=r"no causal language model around a decoder|does not name its"):
        add_state_transition(model.model, config())
    add_state_transition(model, config())
    with pytest.raises(ValueError, match="has state transition already"):
        add_state_transition(model, config())


def test_what_a_converted_model_cannot_read() -> None:
    transition = converted("llama")
    model = transition.model
    with pytest.raises(ValueError, match="reads input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 48))
    with pytest.raises(ValueError, match=r"attention_mask of \[rows, tokens\]"):
        model(TWO_TEXTS, attention_mask=torch.ones(2, 1, 40, 40))
    used = DynamicCache(config=model.config)
    with transition.disabled(), torch.no_grad():
        model(text(5)[None], past_key_values=used, use_cache=True)
    with pytest.raises(ValueError, match="the DynamicCache given holds tokens already"):
        model(text(5)[None], past_key_values=used, use_cache=True)
    _, cache = in_turn(model, TWO_TEXTS, 40)
    with pytest.raises(ValueError, match="the cache holds 2 rows of text; got tokens for 1"):
        model(TWO_TEXTS[:1, :2], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"2 rows of 40 tokens in the cache and 2 new ones; got \(2, 2\)"):
        model(TWO_TEXTS[:, :2], attention_mask=torch.ones(2, 2), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="cannot be rolled back"):
        cache.crop(-1)
    with transition.disabled(), pytest.raises(ValueError, match="the base model cannot use a StateTransitionCache"):
        model(TWO_TEXTS[:, :1], past_key_values=cache, use_cache=True)
    foreign = converted("llama", max_alpha=0.1).new_cache()
    with pytest.raises(ValueError, match="belongs to another conversion"):
        model(TWO_TEXTS, past_key_values=foreign, use_cache=True)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot be shown steps; there are sdpa, eager, flex_attention"):
        whole(model, TWO_TEXTS)


def test_what_would_go_wrong_without_a_word_is_refused() -> None:
    transition = converted("llama")
    model = transition.model.train()
    model.model(TWO_TEXTS, use_cache=False).last_hidden_state.sum().backward()  # a loss past the output layer
    with pytest.raises(ValueError, match=r"step tokens were not trained .* use StateTransitionTrainer"):
        model(TWO_TEXTS, use_cache=False)
    model(TWO_TEXTS, use_cache=False)
    model.resize_token_embeddings(110)
    with pytest.raises(ValueError, match="output layer was replaced after the conversion"):
        model(TWO_TEXTS, use_cache=False)
    again = converted("llama")
    again.remove()
    with pytest.raises(ValueError, match="was removed already"):
        again.remove()
    adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="has PEFT adapters; merge them first"):
        add_state_transition(adapted, config())


def test_flex_attention_takes_no_pieces() -> None:
    several = Running(config(), layout_of(TWO_TEXTS[:, :3]), sees=torch.ones(2, 3, 9, dtype=torch.bool))
    assert several.mask(torch.float32, "sdpa").shape == (2, 1, 3, 9)
    with pytest.raises(ValueError, match="flex_attention cannot read several tokens more"):
        several.mask(torch.float32, "flex_attention")
    one = Running(config(), layout_of(TWO_TEXTS[:, :1]), sees=torch.ones(2, 1, 9, dtype=torch.bool))
    assert one.mask(torch.float32, "flex_attention").shape[-2:] == (1, 9)


@pytest.mark.parametrize("name", ["bloom", "minimax"])
def test_a_conversion_that_cannot_run_is_undone(name: str) -> None:
    model = build(name)
    names, plain = set(model.state_dict()), text(20)[None]
    base = whole(model, plain)
    with pytest.raises(ValueError, match="could not read a text with steps after the conversion, which was undone"):
        add_state_transition(model, config())
    assert set(model.state_dict()) == names and torch.equal(whole(model, plain), base)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
