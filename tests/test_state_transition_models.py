"""Converted models: the base bit for bit, training form against token by token, gradients, routing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from routeguard import find_routes, measure_recall, restore
from routeguard.demo.model import load_model, load_tokenizer
from routeguard.drift.meter import track
from routeguard.state_transition.convert import add_state_transition
from tests.state_transition_texts import (
    TWO_TEXTS,
    awaken,
    config,
    converted,
    in_turn,
    text,
    whole,
)
from tests.zoo.build import build

pytestmark = pytest.mark.filterwarnings("ignore")


SOFTMAX = ["qwen2", "qwen3", "llama", "smollm3", "phi3", "gpt2"]


HYBRIDS = ["gemma2", "gemma3_text", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h", "jamba", "olmo_hybrid"]


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
    meter = track(model, routes)
    ids = torch.cat([torch.randint(10, 80, (1, 8)), torch.tensor([[83, 20, 21, 84, 83, 22, 84]])], 1)
    model.train()
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    meter.measure(2)
    (sample,) = meter.read()
    assert sample.factors and set(sample.factors.values()) == {0.0}
    now = model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in start.state_dict().items())
    restore(model, start)
    found = measure_recall(model, load_tokenizer(), tasks="demo_needles", lengths=(128,), num_samples=4)
    assert found.accuracy() == base.accuracy() == 1.0  # needle texts have no steps: the path adds nothing
    assert "linear paths in layers [2, 5], 2 step tokens" in str(transition) and str(transition) in str(
        find_routes(model)
    )


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
