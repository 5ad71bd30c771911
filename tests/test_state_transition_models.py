"""Converted models: the base bit for bit, training form against generation, saving, removing, refusals."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StaticCache

from routeguard import find_routes, measure_recall, restore
from routeguard.cli.main import app
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.drift.meter import track
from routeguard.state_transition.cache import StateTransitionCache
from routeguard.state_transition.convert import StateTransition, add_state_transition
from routeguard.state_transition.describe import saved_transition
from routeguard.state_transition.step_limit import StepLimit
from routeguard.state_transition.step_tokens import StepTokens
from tests.state_transition_texts import (
    END,
    OTHER,
    START,
    TWO_TEXTS,
    Dictated,
    awaken,
    config,
    converted,
    in_pieces,
    text,
    whole,
)
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")

SOFTMAX = ["qwen2", "qwen3", "llama", "smollm3", "phi3", "gpt2"]
HYBRIDS = ["gemma2", "gemma3_text", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h", "jamba", "olmo_hybrid"]


def in_turn(model: Any, ids: Tensor, prefix: int, mask: Tensor | None = None) -> tuple[Tensor, StateTransitionCache]:
    """Logits of a text read up to `prefix` at once and then token by token, with the cache."""
    return in_pieces(model, ids, range(prefix, ids.shape[1]), mask=mask)


@pytest.mark.parametrize("name", SOFTMAX + HYBRIDS)
def test_a_fresh_conversion_is_the_base_model_bit_for_bit(name: str) -> None:
    model = build(name)
    plain = torch.stack([text(30), text(30, seed=1)])
    base = whole(model, plain)
    names = set(model.state_dict())
    transition = add_state_transition(model, config())
    found = whole(model, plain)
    assert torch.equal(found[..., : base.shape[-1]], base) and found.shape[-1] == 99
    mask = torch.ones_like(plain)
    mask[1, :7] = 0
    with transition.disabled():
        padded = whole(model, plain, attention_mask=mask)
        assert padded.shape == base.shape
    assert torch.equal(whole(model, plain, attention_mask=mask)[..., : base.shape[-1]], padded)
    assert not any(
        p.requires_grad
        for name, p in model.named_parameters()
        if "state_transition" not in name and "step_tokens" not in name
    )
    awaken(transition)
    step = torch.stack([text(10, "(", 19), text(14, "(", 15)])
    assert (whole(model, step)[..., :90] - whole(model, plain)[..., :90]).abs().max() > 1e-3  # it does add something
    assert transition.remove() is model
    assert set(model.state_dict()) == names and torch.equal(whole(model, plain), base)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", SOFTMAX + HYBRIDS)
@pytest.mark.parametrize("prefix", [3, 22])
def test_token_by_token_is_the_whole_text(name: str, prefix: int) -> None:
    model = converted(name).model
    at_once = whole(model, TWO_TEXTS)
    logits, cache = in_turn(model, TWO_TEXTS, prefix)
    torch.testing.assert_close(logits, at_once, rtol=1e-3, atol=2e-4)
    # Prompt and last stretch of each row; the longer of both, and one place each for what closed a step last.
    held = {cache.layers[layer].keys.shape[2] for layer in cache.converted}
    assert held == {13} and cache.get_seq_length(cache.converted[0]) == 40


def test_steps_are_forgotten_but_for_the_state() -> None:
    """Positive control: another first step changes what is read later, through the paths alone."""
    transition = converted("llama", dtype=torch.float64)
    other = TWO_TEXTS.clone()
    other[0, 9] = 11
    later = slice(14, None)
    assert not torch.equal(whole(transition.model, other)[0, later], whole(transition.model, TWO_TEXTS)[0, later])
    for path in transition.paths.values():
        torch.nn.init.zeros_(path.multiplier)
    assert torch.equal(whole(transition.model, other)[0, later], whole(transition.model, TWO_TEXTS)[0, later])


def test_float64_agrees_to_rounding() -> None:
    model = converted("gpt2", dtype=torch.float64).model  # the one without float32 inside
    logits, _ = in_turn(model, TWO_TEXTS, 5)
    torch.testing.assert_close(logits, whole(model, TWO_TEXTS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = converted(name).model
    texts = [TWO_TEXTS[0], TWO_TEXTS[1][:31]]
    padded = torch.full((2, 40), 10)
    mask = torch.zeros_like(padded)
    for row, one in enumerate(texts):
        padded[row, 40 - len(one) :], mask[row, 40 - len(one) :] = one, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    rows = whole(model, padded, attention_mask=mask, position_ids=positions)
    turned, _ = in_turn(model, padded, 17, mask)
    for row, one in enumerate(texts):
        alone = whole(model, one[None])[0]
        torch.testing.assert_close(rows[row, 40 - len(one) :], alone, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(turned[row, 40 - len(one) :], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_samples_do_not_see_each_other(implementation: str) -> None:
    transition = converted("llama", dtype=torch.float64)
    transition.model.set_attn_implementation(implementation)
    one, two = TWO_TEXTS[0], TWO_TEXTS[1][:31]
    packed = torch.cat([one, two])[None]
    positions = torch.cat([torch.arange(40), torch.arange(31)])[None]
    found = whole(transition.model, packed, position_ids=positions)
    for piece, alone in ((slice(0, 40), one), (slice(40, None), two)):
        torch.testing.assert_close(found[0, piece], whole(transition.model, alone[None])[0], rtol=1e-6, atol=1e-6)


MARKS = ({13: START, 18: END, 19: START, 30: END, 31: OTHER, 45: END}, {15: END, 20: START, 26: OTHER, 40: END})


@pytest.mark.slow  # it compiles
def test_flex_attention_sees_the_same() -> None:
    """Forward only: on a CPU it has no backward pass."""
    model = converted("llama").model
    mask = torch.ones_like(TWO_TEXTS)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    wanted = whole(model, TWO_TEXTS, attention_mask=mask, position_ids=positions)
    model.set_attn_implementation("flex_attention")
    found = whole(model, TWO_TEXTS, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-3, atol=1e-4)
    turned, _ = in_turn(model, TWO_TEXTS, 37, mask)
    torch.testing.assert_close(turned[mask.bool()], wanted[mask.bool()], rtol=1e-3, atol=1e-4)


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


def test_gradients_reach_what_is_trained_and_nothing_else() -> None:
    transition = converted("qwen3_next", gate="channel")
    model = transition.model.train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(TWO_TEXTS, labels=TWO_TEXTS).loss.backward()
        return {name: p.grad.clone() for name, p in transition.named_parameters() if p.grad is not None}

    plain = gradients()
    assert set(plain) == {name for name, _ in transition.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    ours = {id(parameter) for _, parameter in transition.named_parameters()}
    assert all(p.grad is None for p in model.parameters() if id(p) not in ours)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(), plain, rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if id(p) in ours}


def test_a_fresh_one_learns_from_its_first_step() -> None:
    """At 0 the multiplier hides the path, yet gets a gradient, and with it the rest at the next step."""
    transition = add_state_transition(build("llama"), config())
    model = transition.model.train()
    optimizer = torch.optim.SGD([p for _, p in transition.named_parameters()], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(TWO_TEXTS, labels=TWO_TEXTS).loss.backward()
        optimizer.step()
    assert all(path.multiplier.abs().max() > 0 for path in transition.paths.values())
    assert any(path.up["query"].weight.abs().max() > 0 for path in transition.paths.values())


def test_16_bit_bases_train_in_float32() -> None:
    transition = converted("llama", dtype=torch.bfloat16)
    assert {p.dtype for _, p in transition.named_parameters()} == {torch.float32}
    model = transition.model.train()
    loss = model(TWO_TEXTS, labels=TWO_TEXTS).loss
    loss.backward()
    assert model.lm_head.weight.dtype == torch.bfloat16 and bool(torch.isfinite(loss))
    assert all(torch.isfinite(p.grad).all() for _, p in transition.named_parameters())
    model.eval()
    logits, _ = in_turn(model, TWO_TEXTS, 9)
    assert (logits - whole(model, TWO_TEXTS))[..., :90].abs().max() < 0.05


@pytest.mark.parametrize("gate", ["head", "channel", "none"])
def test_saved_and_loaded(gate: str, tmp_path: Path) -> None:
    transition = converted("qwen3_next", gate=gate, features="identity")
    expected = whole(transition.model, TWO_TEXTS)
    transition.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state_transition.json", "state_transition.safetensors"]
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "linear paths in layers [3], 2 start tokens and an end; " in shown and f"gate {gate!r}" in shown
    as_json = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output)
    assert as_json["num_parameters"] == sum(p.numel() for _, p in transition.named_parameters())
    refused = CliRunner().invoke(app, ["inspect", str(tmp_path), "--norms"])
    assert refused.exit_code == 2 and "holds a state transition, no checkpoint" in refused.output + refused.stderr
    again = StateTransition.from_pretrained(build("qwen3_next"), tmp_path)
    assert torch.equal(whole(again.model, TWO_TEXTS), expected) and again.config == transition.config
    assert set(transition.openness) == (set() if gate == "none" else {3})
    model = build("llama")
    with pytest.raises(ValueError, match=r"belongs to another model: .* weights do not fit, the first is layers"):
        StateTransition.from_pretrained(model, tmp_path)
    assert getattr(model, "state_transition", None) is None
    with pytest.raises(ValueError, match="holds no state transition"):
        StateTransition.from_pretrained(model, tmp_path / "nothing")
    (tmp_path / "state_transition.json").write_text("{'rank'")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        StateTransition.from_pretrained(model, tmp_path)


def test_a_folder_names_its_base_model(tmp_path: Path) -> None:
    transition = converted("llama")
    transition.model.config._name_or_path = "us/small"
    transition.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "state_transition.json").read_text())["base_model_name_or_path"] == "us/small"
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "base model: us/small; its queries and keys are frozen" in shown
    assert saved_transition(tmp_path)["base_model_name_or_path"] == "us/small"
    with pytest.raises(ValueError, match=r"belongs to another model \(us/small\): .* weights do not fit"):
        StateTransition.from_pretrained(build("qwen2"), tmp_path)
    for name, number in (("us/small", 0), ("", 0), ("them/small", 1)):
        model = build("llama")
        model.config._name_or_path = name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            StateTransition.from_pretrained(model, tmp_path)
        told = [str(w.message) for w in caught if "was trained beside 'us/small' and is put on" in str(w.message)]
        assert len(told) == number


def test_a_saved_path_is_tried_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted("llama").save_pretrained(tmp_path)
    model = build("llama")
    names = set(model.state_dict())
    (tmp_path / "state_transition.safetensors").write_bytes(b"broken")
    with pytest.raises(Exception, match=r"(?i)header|safetensor"):
        StateTransition.from_pretrained(model, tmp_path)
    assert set(model.state_dict()) == names and not model.lm_head._forward_hooks
    monkeypatch.setattr(type(model.model), "forward", lambda self, *args, **kwargs: 1 / 0)
    with pytest.raises(
        ValueError, match="could not read a text with steps after the conversion, which was undone: div"
    ):
        StateTransition.from_pretrained(model, tmp_path)
    assert set(model.state_dict()) == names


def test_embeddings_of_each_layer_do_not_know_step_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 looks tokens up a second time, in a table of the base vocabulary's size."""
    model = converted("gemma4_text").model
    logits, _ = in_turn(model, TWO_TEXTS, 22)
    torch.testing.assert_close(logits, whole(model, TWO_TEXTS), rtol=1e-3, atol=2e-4)
    monkeypatch.setattr(StepTokens, "before_other", lambda self, module, args: None)
    with pytest.raises(ValueError, match="which was undone: index out of range"):
        add_state_transition(build("gemma4_text"), config())


def test_a_copy_is_its_own() -> None:
    transition = converted("llama")
    copied = copy.deepcopy(transition.model)
    torch.nn.init.zeros_(copied.state_transition.paths[0].multiplier)
    assert torch.equal(whole(transition.model, TWO_TEXTS), whole(copy.deepcopy(transition.model), TWO_TEXTS))
    assert not torch.equal(whole(copied, TWO_TEXTS), whole(transition.model, TWO_TEXTS))
    plain, ours = text(20)[None], whole(transition.model, TWO_TEXTS)
    copied.state_transition.remove()
    assert torch.equal(whole(copied, plain), whole(build("llama"), plain))
    assert torch.equal(whole(transition.model, TWO_TEXTS), ours)


def test_routing_stays_where_it_was() -> None:
    """Routes by the same names, no drift, nothing to restore, recall measured."""
    model = load_model()
    start = copy.deepcopy(model)
    routes = find_routes(model)
    base = measure_recall(model, load_tokenizer(), tasks="demo_needles", lengths=(128,), num_samples=4)
    transition = add_state_transition(model, config(start_token_ids=(83,), end_token_id=84))
    assert [r.parameter for r in find_routes(model)] == [r.parameter for r in routes]
    awaken(transition)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with pytest.raises(ValueError, match="queries and keys cannot move"):
        track(model, routes)
    ids = torch.cat([torch.randint(10, 80, (1, 8)), torch.tensor([[83, 20, 21, 84, 83, 22, 84]])], 1)
    model.train()
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in start.state_dict().items())
    restore(model, start)
    found = measure_recall(model, load_tokenizer(), tasks="demo_needles", lengths=(128,), num_samples=4)
    assert found.accuracy() == base.accuracy() == 1.0  # needle texts have no steps: the path adds nothing
    assert "linear paths in layers [2, 5], 2 step tokens" in str(transition) and str(transition) in str(
        find_routes(model)
    )


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
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot be shown steps; there are sdpa, eager, flex_attention"):
        whole(model, TWO_TEXTS)


def test_another_pass_before_the_backward_one_changes_no_gradient() -> None:
    """With gradient checkpointing a layer is computed again later, and has to meet its own pass."""
    other = text(6, "(", 9, ")", "[", 7, ")", "(", 7, ")", 5, seed=5)[None]

    def gradients(*, checkpointing: bool, between: bool) -> dict[str, Tensor]:
        transition = converted("llama", seed=3)
        model = transition.model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(TWO_TEXTS[:1], use_cache=False).logits.square().mean()
        if between:
            with torch.no_grad():
                model(other, use_cache=False)
        loss.backward()
        return {name: p.grad for name, p in transition.named_parameters() if p.grad is not None}

    torch.manual_seed(0)
    plain = gradients(checkpointing=False, between=False)
    for between in (False, True):
        torch.manual_seed(0)
        torch.testing.assert_close(gradients(checkpointing=True, between=between), plain, rtol=1e-4, atol=1e-7)


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


@pytest.mark.parametrize("name", ["bloom", "minimax"])
def test_a_conversion_that_cannot_run_is_undone(name: str) -> None:
    model = build(name)
    names, plain = set(model.state_dict()), text(20)[None]
    base = whole(model, plain)
    with pytest.raises(ValueError, match="could not read a text with steps after the conversion, which was undone"):
        add_state_transition(model, config())
    assert set(model.state_dict()) == names and torch.equal(whole(model, plain), base)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
