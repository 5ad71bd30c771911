"""What a StateTransitionCache goes on with: pieces of a text, later turns, rows that wait for others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

from routeguard.state_transition.convert import add_state_transition
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

EOS, PAD = 90, 91
CUTS = [(3, 12, 13, 22, 30), (22,), (1, 2, 39), tuple(range(1, 40, 2))]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "qwen3_next", "lfm2"])
def test_pieces_are_the_whole_text(name: str, cuts: tuple[int, ...]) -> None:
    """Steps that end, break off and stay open within pieces, at other places in each row."""
    model = converted(name).model
    found, cache = in_pieces(model, TWO_TEXTS, cuts)
    torch.testing.assert_close(found, whole(model, TWO_TEXTS), rtol=1e-3, atol=2e-4)
    assert cache.valid.shape[1] == 13  # what it keeps does not depend on how it was read


def test_pieces_in_float64() -> None:
    model = converted("gpt2", dtype=torch.float64, running_mean="corrected").model
    wanted = whole(model, TWO_TEXTS)
    for cuts in CUTS:
        found, cache = in_pieces(model, TWO_TEXTS, cuts)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    # Control: the state is what makes later pieces right.
    for state in cache.states.values():
        state.before.zero_()
    more, ours = text(4, ")", "(", 3, seed=7).repeat(2, 1), TWO_TEXTS
    with torch.no_grad():
        found = model(more, past_key_values=cache, use_cache=True).logits
    assert (found - whole(model, torch.cat([ours, more], 1))[:, 40:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padding_anywhere(name: str) -> None:
    """Rows of different length in each piece, padded on the left or right, are what they are alone."""
    model = converted(name).model
    width, parts = 34, []
    for row, cuts in enumerate(((0, 9, 21, 40), (0, 17, 20, 31))):
        parts.append([TWO_TEXTS[row, a:b] for a, b in pairwise(cuts)])
    ids, mask = torch.full((2, 3, width), 10), torch.zeros(2, 3, width, dtype=torch.long)
    for row in range(2):
        for number, part in enumerate(parts[row]):
            place = slice(width - len(part), None) if number == 1 else slice(0, len(part))
            ids[row, number, place], mask[row, number, place] = part, 1
    ids, mask = ids.flatten(1), mask.flatten(1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    at_once = whole(model, ids, attention_mask=mask, position_ids=positions)
    found, cache = in_pieces(model, ids, (width, 2 * width), mask=mask)
    for row, size in ((0, 40), (1, 31)):
        alone = whole(model, TWO_TEXTS[row : row + 1, :size])[0]
        if name == "llama":  # a sliding window counts padding
            torch.testing.assert_close(found[row, mask[row].bool()], alone, rtol=1e-3, atol=1e-4)
        real = mask[row].bool()
        torch.testing.assert_close(found[row, real], at_once[row, real], rtol=1e-3, atol=1e-4)
    assert cache.seen == 3 * width and cache.valid.shape[1] < 20


def speaker(name: str = "llama") -> Any:
    """A converted model whose texts end with EOS and are filled up with PAD."""
    model = converted(name).model
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    return model


def asked(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows padded on the left, and their mask."""
    width = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    return ids, mask


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_second_turn_on_the_cache_of_the_first(name: str) -> None:
    model = speaker(name)
    first = text(9, seed=3)[None]
    script = [
        LogitsProcessorList([Dictated(marks, never=(EOS,))])
        for marks in ({9: START, 14: END, 15: OTHER, 22: END, 26: EOS}, {35: START, 39: END, 44: EOS})
    ]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
    cache = model.state_transition.new_cache()
    spoken = model.generate(first, past_key_values=cache, logits_processor=script[0], **options)
    again = torch.cat([spoken, text(7, seed=4)[None]], 1)  # EOS, and then the next question
    assert spoken.shape[1] == 27 and cache.seen == 26
    kept = model.generate(again, past_key_values=cache, logits_processor=script[1], **options)
    anew = model.generate(again, logits_processor=script[1], **options)
    assert torch.equal(kept, anew) and kept.shape[1] == 45
    logits = whole(model, kept)[0, :-1]
    more, _ = in_pieces(model, kept[:, :-1], (26, *range(34, 44)))
    torch.testing.assert_close(more[0], logits, rtol=1e-3, atol=1e-4)


def test_chunked_prefill_writes_the_same() -> None:
    model = speaker()
    prompt = torch.cat([TWO_TEXTS[0], text("(", 3)])[None]
    options = {"do_sample": False, "max_new_tokens": 12, "logits_processor": LogitsProcessorList([Dictated({47: END})])}
    wanted = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prefill_chunk_size=7, **options), wanted)


def test_rows_that_wait_keep_nothing_more() -> None:
    """A row that ended early: what the other writes is the same, and places grow with that one alone."""
    model = speaker()
    ids, mask = asked(text(8, seed=1), text(6, seed=2))
    long = {8 + 8 * i + j: token for i in range(6) for j, token in ((0, START), (6, END))} | {60: EOS}
    script = LogitsProcessorList([Dictated({8: START, 11: END, 13: EOS}, long, never=(EOS,))])
    cache = model.state_transition.new_cache()
    options = {"do_sample": False, "max_new_tokens": 60, "logits_processor": script, "attention_mask": mask}
    written = model.generate(ids, past_key_values=cache, **options)
    assert (written[0, 14:] == PAD).all() and written.shape[1] == 61
    alone = LogitsProcessorList([Dictated({place - 2: token for place, token in long.items()}, never=(EOS,))])
    single = model.generate(ids[1:, 2:], do_sample=False, max_new_tokens=60, logits_processor=alone)
    assert torch.equal(written[1, 2:], single[0])
    counts = cache.valid.sum(1)
    assert counts[0] == 8 + 2  # the question, a word of an answer, EOS
    assert cache.valid.shape[1] == counts.max() < 20 and cache.seen == 60
    unaware = model.state_transition.new_cache(eos_token_ids=())
    assert torch.equal(model.generate(ids, past_key_values=unaware, **options), written)
    assert unaware.valid.shape[1] > 50  # control: otherwise it takes in what it is given


def test_rows_that_waited_go_on() -> None:
    """A second turn of a batch in which each row ended at a place of its own."""
    model = speaker()
    ids, mask = asked(text(8, seed=1), text(6, seed=2))
    script = [{8: START, 11: END, 13: EOS}, {9: START, 15: END, 20: OTHER, 28: END, 33: EOS}]
    cache = model.state_transition.new_cache()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, "past_key_values": cache}
    spoken = model.generate(
        ids, attention_mask=mask, logits_processor=LogitsProcessorList([Dictated(*script, never=(EOS,))]), **options
    )
    spoken_mask = torch.cat([mask, torch.ones(2, spoken.shape[1] - 8, dtype=torch.long)], 1)
    spoken_mask[0, 14:] = 0
    more, more_mask = asked(text(5, seed=5), text(9, seed=6))
    again, mask = torch.cat([spoken, more], 1), torch.cat([spoken_mask, more_mask], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        found = model(
            again[:, cache.seen :],
            attention_mask=mask,
            position_ids=positions[:, cache.seen :],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    for row in range(2):
        alone = again[row][mask[row].bool()]
        torch.testing.assert_close(found[row], whole(model, alone[None])[0, -1], rtol=1e-3, atol=1e-4)


def test_an_end_is_text_where_nobody_waits() -> None:
    """One row, or several tokens: two ends in a row are read as any tokens."""
    model = speaker()
    ids = torch.cat([text(5, "(", 3, ")"), torch.tensor([EOS, EOS, PAD, EOS]), text(2)])[None]
    wanted = whole(model, ids)
    torch.testing.assert_close(in_pieces(model, ids, range(9, 16))[0], wanted, rtol=1e-3, atol=1e-4)
    both, _ = in_pieces(model, ids.repeat(2, 1), (9, 11))
    torch.testing.assert_close(both[1:], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bamba", "jamba"])
def test_pieces_are_refused_where_other_layers_forget(name: str) -> None:
    model = converted(name).model
    with pytest.raises(ValueError, match=r"do not carry theirs over to several tokens more"):
        in_pieces(model, TWO_TEXTS, (22,))
    found, _ = in_pieces(model, TWO_TEXTS, (22, *range(23, 40)))
    torch.testing.assert_close(found, whole(model, TWO_TEXTS), rtol=1e-3, atol=2e-4)


def test_positions_of_a_cached_text_are_known() -> None:
    """Bamba itself begins at 0 with each pass unless it is told where it stands; converted it is told."""
    base, ids = build("bamba"), text(40)[None]
    turned, _ = in_pieces(base, ids, range(22, 40), cache=DynamicCache(config=base.config))
    apart = (turned - whole(base, ids)).abs().max()
    told, _ = in_pieces(base, ids, range(22, 40), cache=DynamicCache(config=base.config), mask=torch.ones_like(ids))
    assert apart > 1e-3 and (told - whole(base, ids)).abs().max() < 1e-5
    transition = add_state_transition(base, config())
    turned, _ = in_pieces(transition.model, ids, range(22, 40))
    awaken(transition)
    torch.testing.assert_close(turned[..., :96], whole(build("bamba"), ids), rtol=1e-3, atol=1e-5)


def test_assisted_decoding_is_refused() -> None:
    model = speaker()
    prompt = torch.cat([text(6), text(6), text(6)])[None]
    with pytest.raises(ValueError, match="requires a cache that can be cropped"):
        model.generate(prompt, do_sample=False, max_new_tokens=20, prompt_lookup_num_tokens=4)


def test_a_cache_that_is_reset_begins_anew() -> None:
    model = speaker()
    _, cache = in_pieces(model, TWO_TEXTS, (22,))
    cache.reset()
    assert not cache.started and cache.seen == 0 and cache.state_bytes == 0 and cache.eos_token_ids == (EOS,)
    found, _ = in_pieces(model, TWO_TEXTS[:1], (22,), cache=cache)
    torch.testing.assert_close(found, whole(model, TWO_TEXTS[:1]), rtol=1e-3, atol=1e-4)
