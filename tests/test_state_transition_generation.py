"""What `generate()` writes with a converted model, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList, StaticCache

from routeguard.state_transition.cache import StateTransitionCache
from routeguard.state_transition.step_limit import StepLimit
from tests.state_transition_texts import (
    END,
    OTHER,
    START,
    TWO_TEXTS,
    Dictated,
    converted,
    in_turn,
    text,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore")


MARKS = ({13: START, 18: END, 19: START, 30: END, 31: OTHER, 45: END}, {15: END, 20: START, 26: OTHER, 40: END})


@pytest.mark.parametrize("name", ["llama", "lfm2", "gemma2"])
def test_generate_writes_what_the_whole_text_says(name: str) -> None:
    """Greedy, two rows of different length, with steps that end at different places."""
    model = converted(name).model
    prompts = torch.full((2, 12), 10)
    mask = torch.ones_like(prompts)
    mask[1, :4] = 0
    prompts[0], prompts[1, 4:] = text(12, seed=5), text(7, "(", seed=6)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 10, None
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    options["logits_processor"] = LogitsProcessorList([Dictated(*MARKS)])
    written = model.generate(prompts, **options)
    for row, start in ((0, 0), (1, 4)):
        logits = whole(model, written[row : row + 1, start:])[0, 11 - start : -1]
        best = logits.max(-1).values - logits.gather(1, written[row, 12:, None])[:, 0]
        free = [i for i in range(40) if i + 12 not in MARKS[row]]
        assert best[free].max() < 1e-3 * logits.std()
        assert [int(written[row, i]) for i in MARKS[row]] == list(MARKS[row].values())
    assert torch.equal(model.generate(prompts, use_cache=False, **options), written)


def test_beams_and_several_answers() -> None:
    model = converted("llama").model
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 10, None
    prompt = text(6, "(", 3)[None]
    marks = LogitsProcessorList([Dictated({13: END, 15: START, 20: END})])
    options = {"max_new_tokens": 16, "num_return_sequences": 2, "logits_processor": marks}
    fast = model.generate(prompt, do_sample=False, num_beams=3, **options)
    assert torch.equal(fast, model.generate(prompt, do_sample=False, num_beams=3, use_cache=False, **options))
    assert not torch.equal(fast[0], fast[1])
    torch.manual_seed(0)
    sampled = model.generate(prompt, do_sample=True, **options)
    torch.manual_seed(0)
    assert torch.equal(sampled, model.generate(prompt, do_sample=True, use_cache=False, **options))


def test_steps_that_run_too_long_are_closed() -> None:
    model = converted("llama").model
    settings = model.state_transition.config
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 10, None
    limit = LogitsProcessorList([Dictated({20: START, 31: START}), StepLimit(settings, 6)])
    prompt = text(4, "(", 9)[None]  # open for ten tokens already
    written = model.generate(prompt, max_new_tokens=30, do_sample=False, logits_processor=limit)[0].tolist()
    assert [i for i, token in enumerate(written) if token == END and i != 20] == [14, 25, 36]
    with pytest.raises(ValueError, match="max_step_tokens must be at least 3"):
        StepLimit(settings, 2)


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    model = converted("llama").model
    held = []
    for steps in (2, 20):
        ids = torch.cat([text(6), *([text("(", 5, ")")] * steps), text("(", 3)])[None]
        _, cache = in_turn(model, ids, 6)
        held.append((cache.kv_bytes, cache.state_bytes))
    assert held[0] == held[1] and held[0][0] > 0 and held[0][1] > 0
    plain = DynamicCache(config=model.config)
    with model.state_transition.disabled(), torch.no_grad():
        model(torch.where(ids >= 96, 20, ids), past_key_values=plain, use_cache=True)
    assert sum(layer.keys.numel() for layer in plain.layers) * 4 * 2 > 10 * held[1][0]


def test_a_given_empty_cache_becomes_ours() -> None:
    model = converted("llama").model
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for piece in (slice(0, 22), *(slice(i, i + 1) for i in range(22, 40))):
            logits.append(model(TWO_TEXTS[:, piece], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole(model, TWO_TEXTS), rtol=1e-3, atol=2e-4)
    assert isinstance(cache, StateTransitionCache) and model.state_transition.running.cache is None
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="cannot use a StaticCache"):
        model(TWO_TEXTS, past_key_values=static, use_cache=True)
