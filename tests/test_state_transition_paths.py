"""The linear path: step layout, momentum, chunks and states against the formulas in plain loops."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from routeguard.state_transition.config import StateTransitionConfig
from routeguard.state_transition.layout import ANSWER, PADDING, PROMPT, STEP, StepLayout, visible
from routeguard.state_transition.linear_attention import chunked_attention, plan_chunks
from routeguard.state_transition.momentum import coefficients, momentum_weight
from routeguard.state_transition.state import StepState
from tests.state_transition_texts import END, START, TWO_TEXTS, config, layout_of, read_in_loops, text

VARIANTS: list[dict[str, Any]] = [
    {},
    {"chunk_tokens": 1},
    {"chunk_tokens": 64},
    {"max_alpha": 0.0},
    {"alpha_rule": "max"},
    {"running_mean": "corrected"},
    {"alpha_rule": "max", "running_mean": "corrected", "chunk_tokens": 3},
]
PACKED = torch.stack(
    [
        torch.cat([text(3, "(", 4, ")", "(", 5, ")", "(", 2, ")"), text(2, "[", 6, ")", "(", 3, ")", 2, seed=3)]),
        torch.cat([text(8, "(", 3, ")", 2, seed=4), text(5, "(", 4, ")", "[", 7, ")", 2, seed=5)]),
    ]
)
POSITIONS = torch.stack(
    [torch.cat([torch.arange(20), torch.arange(17)]), torch.cat([torch.arange(15), torch.arange(22)])]
)


def test_the_layout_of_a_text() -> None:
    layout = layout_of(text(2, "(", 1, ")", 1, "(", 1, "[", 1, ")", ")", 1))
    assert layout.kind.tolist() == [[0, 0, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 2]]  # an end outside of a step is plain text
    assert layout.step.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3]]
    assert layout.segment.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4, 5, 5]]
    assert not layout.single and layout_of(text(5)).single and layout_of(text(2, "(", 3, ")")).single
    assert not layout_of(text(2, "(", 3, ")", 1)).single  # an answer does not see the step


def test_the_layout_of_packed_and_padded_rows() -> None:
    layout = layout_of(PACKED, position_ids=POSITIONS)
    assert layout.sample.tolist() == [[0] * 20 + [1] * 17, [0] * 15 + [1] * 22]
    assert layout.step[0].max() == 3 and layout.step[0, 20:].max() == 2
    assert layout.kind[0, 20:22].tolist() == [PROMPT, PROMPT]
    mask = torch.ones_like(PACKED)
    mask[:, :4] = 0
    padded = layout_of(PACKED, attention_mask=mask)
    assert (padded.kind[:, :4] == PADDING).all() and padded.sample.max() == 0
    assert padded.step[0].tolist()[4:11] == [0] * 5 + [1] * 2  # the first start is padding, so its step is prompt


def test_who_sees_whom() -> None:
    """Against the rule, pair by pair."""
    mask = torch.ones_like(PACKED)
    mask[1, :3] = 0
    layout = layout_of(PACKED, position_ids=POSITIONS, attention_mask=mask)
    found = visible(layout)[:, 0]
    kind, sample, segment = layout.kind, layout.sample, layout.segment
    for row in range(2):
        for i in range(PACKED.shape[1]):
            for j in range(PACKED.shape[1]):
                near = kind[row, j] == PROMPT or segment[row, i] == segment[row, j]
                allowed = j <= i and sample[row, i] == sample[row, j] and near and kind[row, j] != PADDING
                assert bool(found[row, i, j]) == (bool(allowed) or i == j)


def test_momentum_by_hand() -> None:
    assert [momentum_weight(t, config(max_steps=10)) for t in (1, 2, 3, 4, 9)] == [0, 0.2, 0.3, 0.4, 0.4]
    assert momentum_weight(2, config(max_steps=10, alpha_rule="max")) == 0.4
    assert momentum_weight(30, config(max_steps=10, alpha_rule="max")) == 1.0
    raw = coefficients(3, config(max_alpha=0.5, max_steps=2))
    assert raw.states[:, 2:].tolist() == [[0, 0, 0], [1, 0, 0], [1.5, 0.5, 0], [1.75, 0.75, 0.5]]
    assert raw.means[2].tolist() == [0, 0, 0.5, 0.5, 0] and raw.states[:, 0].tolist() == [1, 1, 1, 1]
    corrected = coefficients(3, config(max_alpha=0.5, max_steps=2, running_mean="corrected"))
    assert corrected.states[:, 2:].tolist() == [[0, 0, 0], [1, 0, 0], [1.5, 0.5, 0], [1.875, 0.625, 0.5]]
    assert coefficients(3, config(max_alpha=0.0, max_steps=2)).states[3].tolist() == [1, 0, 1, 1, 1]


@pytest.mark.parametrize("mean", ["raw", "corrected"])
def test_momentum_goes_on_where_it_was(mean: str) -> None:
    """Six steps at once, or two and four more: the state and the mean after the two are the first two columns."""
    settings = config(max_steps=5, running_mean=mean)
    whole, first, more = coefficients(6, settings), coefficients(2, settings), coefficients(4, settings, 2)
    before = torch.cat([torch.stack([first.states[2], first.means[2]])[:, 2:], torch.zeros(2, 4)], 1).double()
    for name in ("states", "means"):
        after, wanted = getattr(more, name), getattr(whole, name)[2:, 2:]
        found = after[:, :2] @ before + torch.cat([torch.zeros(5, 2), after[:, 2:]], 1)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert not torch.equal(more.states, coefficients(4, settings).states)


def tensors(rows: int, tokens: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((rows, 4, tokens, 5), (rows, 2, tokens, 5), (rows, 2, tokens, 3))
    return tuple(torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("case", ["steps", "packed", "padded"])
def test_chunks_are_the_recurrence(changes: dict[str, Any], case: str) -> None:
    """Outputs and gradients, float64: unequal steps, a broken and an open one, packed samples, padding."""
    settings = config(**changes)
    if case == "steps":
        layout = layout_of(TWO_TEXTS)
    else:
        mask = torch.ones_like(PACKED)
        mask[1, -5:] = 0
        mask[0, :2] = 0
        layout = layout_of(PACKED, position_ids=POSITIONS, attention_mask=mask if case == "padded" else None)
    inputs = tensors(*layout.kind.shape)
    plain = read_in_loops(*inputs, layout, settings)
    fast = chunked_attention(*inputs, plan_chunks(layout, settings))
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    weight = torch.randn(plain.shape, dtype=plain.dtype, generator=torch.Generator().manual_seed(8))
    wanted = torch.autograd.grad((plain * weight).sum(), inputs)
    found = torch.autograd.grad((fast * weight).sum(), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        assert other.abs().max() > 0.1
    assert (plain[:, :, (layout.kind == PROMPT).all(0)] == 0).all()


def test_momentum_and_order_matter() -> None:
    """Positive control of the comparison above."""
    layout = layout_of(TWO_TEXTS)
    inputs = tensors(*layout.kind.shape)
    usual = chunked_attention(*inputs, plan_chunks(layout, config()))
    for changes in ({"max_alpha": 0.0}, {"alpha_rule": "max"}, {"running_mean": "corrected"}, {"max_steps": 40}):
        other = chunked_attention(*inputs, plan_chunks(layout, config(**changes)))
        assert (usual - other).abs().max() > 1e-3
    one_step = layout_of(torch.stack([text(6, "(", 33)] * 2))
    assert (usual - chunked_attention(*inputs, plan_chunks(one_step, config()))).abs().max() > 0.1


def test_float32_is_near_and_16_bits_are_computed_in_float32() -> None:
    layout = layout_of(TWO_TEXTS)
    plan = plan_chunks(layout, config())
    exact = chunked_attention(*tensors(*layout.kind.shape), plan)
    single = tuple(t.float() for t in tensors(*layout.kind.shape))
    torch.testing.assert_close(chunked_attention(*single, plan).double(), exact, rtol=1e-5, atol=1e-5)
    half = tuple(t.bfloat16() for t in single)
    of_half = chunked_attention(*(t.float() for t in half), plan).bfloat16()
    assert torch.equal(chunked_attention(*half, plan), of_half)


def in_turn(
    state: StepState, inputs: tuple[torch.Tensor, ...], layout: StepLayout, places: slice, read: list[torch.Tensor]
) -> None:
    """Let a state read tokens one at a time, finishing steps when the next one shows that they ended."""
    for i in range(layout.kind.shape[1])[places]:
        before = layout.step[:, i] - (layout.kind[:, i] == STEP).long()
        behind = (state.steps < before) & (layout.kind[:, i] >= STEP)
        if behind.any():
            state.finish(behind)
        one = (tensor[:, :, i : i + 1] for tensor in inputs)
        read.append(state.read(*one, layout.kind[:, i]))


@pytest.mark.parametrize("changes", [*VARIANTS[3:], {}], ids=str)
def test_the_state_token_by_token_and_in_pieces(changes: dict[str, Any]) -> None:
    settings = config(**changes)
    mask = torch.ones_like(TWO_TEXTS)
    mask[0, 17:21] = 0  # padding within a step
    layout = layout_of(TWO_TEXTS, attention_mask=mask)
    inputs = tuple(t.detach() for t in tensors(*layout.kind.shape))
    plain = read_in_loops(*inputs, layout, settings)
    state, read = StepState(settings, *inputs[1:]), []
    in_turn(state, inputs, layout, slice(None), read)
    torch.testing.assert_close(torch.cat(read, 2), plain, rtol=1e-12, atol=1e-12)
    state.finish(state.steps < layout.end.finished)

    for cuts in ([40], [1, 40], [13, 14, 21, 40], [6, 7, 18, 25, 27, 39, 40], [33, 40]):
        pieces, found, end = StepState(settings, *inputs[1:]), [], None
        for start, stop in zip([0, *cuts], cuts, strict=False):
            part = slice(start, stop)
            one = layout_of(TWO_TEXTS[:, part], attention_mask=mask[:, part], before=end)
            finished, end = (None if end is None else end.finished), one.end
            plan = plan_chunks(one, settings, finished)
            found.append(pieces.read_piece(*(t[:, :, part] for t in inputs), plan, end.finished))
        torch.testing.assert_close(torch.cat(found, 2), plain, rtol=1e-12, atol=1e-12)
        for name in ("current", "before", "average", "steps"):
            torch.testing.assert_close(getattr(pieces, name), getattr(state, name), rtol=1e-12, atol=1e-12)
        assert pieces.steps.tolist() == [3, 3] and pieces.open[1].abs().max() > 0 == pieces.open[0].abs().max()

    # Control: without what was carried over, or with steps counted anew, a later piece is another.
    tail = layout_of(TWO_TEXTS[:, 25:], attention_mask=mask[:, 25:], before=layout_of(TWO_TEXTS[:, :25]).end)
    later = tuple(t[:, :, 25:] for t in inputs)
    fresh = StepState(settings, *inputs[1:]).read_piece(*later, plan_chunks(tail, settings), tail.end.finished)
    assert (fresh - plain[:, :, 25:]).abs().max() > 0.1
    assert state.num_bytes == 3 * 8 * 2 * 2 * 5 * 3  # of rows, key heads, width, value width


def test_the_layout_goes_on_where_a_text_stopped() -> None:
    """Wherever it is cut: the same kinds and steps, and stretches that begin where they began."""
    mask = torch.ones_like(TWO_TEXTS)
    mask[0, :3] = mask[1, 10:14] = 0
    whole = layout_of(TWO_TEXTS, attention_mask=mask)
    assert whole.end.step.tolist() == [3, 4] and whole.end.open.tolist() == [False, True]
    assert whole.end.finished.tolist() == [3, 3]
    for cut in range(1, 40):
        first = layout_of(TWO_TEXTS[:, :cut], attention_mask=mask[:, :cut])
        second = layout_of(TWO_TEXTS[:, cut:], attention_mask=mask[:, cut:], before=first.end)
        for name in ("kind", "step"):
            assert torch.equal(torch.cat([getattr(first, name), getattr(second, name)], 1), getattr(whole, name))
        segment = torch.cat([first.segment, second.segment + first.end.segment[:, None]], 1)
        assert torch.equal(segment.diff(dim=1) > 0, whole.segment.diff(dim=1) > 0)
        assert torch.equal(second.end.open, whole.end.open) and torch.equal(second.end.step, whole.end.step)


def test_an_answer_reads_all_finished_steps_and_adds_nothing() -> None:
    layout = layout_of(text(2, "(", 3, ")", 4, "(", 2, ")", 2))
    assert (layout.kind == ANSWER).sum() == 6
    query, key, value = (t.detach() for t in tensors(*layout.kind.shape))
    plan = plan_chunks(layout, config(max_alpha=0.0))
    read = chunked_attention(query, key, value, plan)
    changed = value.clone()
    changed[:, :, 7:11] += 1  # the answer in between
    assert torch.equal(chunked_attention(query, key, changed, plan)[:, :, 11:], read[:, :, 11:])
    changed = value.clone()
    changed[:, :, 3] += 1  # the first step
    moved = (chunked_attention(query, key, changed, plan) - read).abs().amax((0, 1, 3))
    assert (moved[:4] == 0).all() and (moved[4:] > 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_token_ids": ()}, "at least one start token"),
        ({"start_token_ids": (END,)}, "all different"),
        ({"start_token_ids": "ab"}, "start_token_ids must be integers; got 'ab'"),
        ({"start_token_ids": (True, 3)}, "start_token_ids must be integers"),
        ({"end_token_id": None}, "end_token_id must be one token id; got None"),
        ({"end_token_id": [98]}, "end_token_id must be one token id"),
        ({"end_token_id": -1}, "not negative"),
        ({"rank": 0}, "rank must be an integer of at least 1; got 0"),
        ({"max_steps": 2.5}, "max_steps must be an integer"),
        ({"max_alpha": 1.5}, "max_alpha must be between 0 and 1; got 1.5"),
        ({"gate": "row"}, "gate must be one of head, channel, none; got 'row'"),
        ({"alpha_rule": "mean"}, "alpha_rule must be one of min, max"),
        ({"max_alpha": "0.4"}, "max_alpha must be between 0 and 1; got '0.4'"),
        ({"max_alpha": float("nan")}, "max_alpha must be between 0 and 1; got nan"),
        ({"adapter_scale": None}, "adapter_scale must be a finite number; got None"),
        ({"adapter_scale": float("inf")}, "adapter_scale must be a finite number; got inf"),
        ({"rank": True}, "rank must be an integer of at least 1; got True"),
        ({"layers": ()}, "converts nothing"),
        ({"layers": (-1, 2)}, "layers must be decoder layers, counted from 0"),
        ({"layers": ("1",)}, "layers must be integers"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_settings_survive_json() -> None:
    settings = config(layers=(3, 1), gate="channel", start_token_ids=[START])
    assert StateTransitionConfig.from_dict(json.loads(settings.to_json())) == settings
    assert settings.layers == (1, 3)
    assert config(layers=2).layers == (2,)
    with pytest.raises(ValueError, match=r"settings without .'end_token_id', 'start_token_ids'"):
        StateTransitionConfig.from_dict({"schema_version": 1, "rank": 3})
    with pytest.raises(ValueError, match="schema version 7"):
        StateTransitionConfig.from_dict({"schema_version": 7})
    with pytest.raises(ValueError, match=r"unknown state-transition settings .'ranks'"):
        StateTransitionConfig.from_dict({**json.loads(settings.to_json()), "ranks": 3})


def test_short_steps_do_not_pay_for_long_chunks() -> None:
    layout = layout_of(text(4, "(", 3, ")", "(", 2, ")", "(", 1, ")"))
    assert plan_chunks(layout, config(chunk_tokens=64)).places.shape == (1, 3, 5)
    assert plan_chunks(layout, config(chunk_tokens=2)).places.shape[2] == 2
