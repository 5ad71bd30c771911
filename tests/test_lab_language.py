"""The lab's language: kinds that share a task and nothing else, and chains whose every step is right."""

from __future__ import annotations

import random

import pytest

from benchmarks.lab.language.chains import CHAIN_KINDS, RULES, SHUFFLES, SUMS, ChainKind, chain_sample, steps_in
from benchmarks.lab.language.needles import (
    DEVELOPMENT,
    NEEDLE_KINDS,
    REPLAYED,
    TESTED,
    NeedleKind,
    most_needles,
    needle_sample,
)
from benchmarks.lab.language.words import VOCABULARY, build_tokenizer
from routeguard.demo import tasks

KINDS = list(NEEDLE_KINDS.values())


def test_words_are_distinct_and_one_token_each() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    tokenizer = build_tokenizer()
    assert len(tokenizer) == len(VOCABULARY)
    ids = tokenizer(" ".join(VOCABULARY[4:]))["input_ids"]
    assert ids == [VOCABULARY.index(tasks.BOS), *range(4, len(VOCABULARY))]


def test_needle_kinds_share_no_marker_and_no_key() -> None:
    assert {TESTED, DEVELOPMENT, *REPLAYED} == set(KINDS) and len(KINDS) == 4
    for a in KINDS:
        for b in KINDS:
            if a is not b:
                assert {a.tell, a.ask}.isdisjoint({b.tell, b.ask})
                assert set(a.keys).isdisjoint(b.keys) and set(a.values).isdisjoint(b.values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_words, num_needles", [(48, 6), (300, 3)])
def test_needles_are_answered_by_the_text_before(kind: NeedleKind, num_words: int, num_needles: int) -> None:
    for seed in range(20):
        sample = needle_sample(kind, num_words, num_needles, random.Random(seed))
        words, width = sample.words, kind.num_values
        assert len(words) == len(sample.in_loss) == num_words
        told = {words[i + 1]: words[i + 2 : i + 2 + width] for i, word in enumerate(words) if word == kind.tell}
        asked = {words[i + 1]: words[i + 2 : i + 2 + width] for i, word in enumerate(words) if word == kind.ask}
        assert len(told) == num_needles and asked == told
        assert max(i for i, word in enumerate(words) if word == kind.tell) < words.index(kind.ask)
        counted = {i for i, counts in enumerate(sample.in_loss) if counts}
        assert counted == {i + 2 + k for i, word in enumerate(words) if word == kind.ask for k in range(width)}


def test_needles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="6 needles of the kind digits asked for in 47 words"):
        needle_sample(TESTED, 47, 6, random.Random(0))
    assert most_needles(REPLAYED, 95) == 8 and most_needles(REPLAYED, 40) == 5


@pytest.mark.parametrize("kind", CHAIN_KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("cells", ["known", "all"])
@pytest.mark.parametrize("reach", ["previous", "any"])
def test_chains_are_right(kind: ChainKind, cells: tasks.Sums, reach: tasks.Reach) -> None:
    new = distant = steps = 0
    for seed in range(30):
        sample = chain_sample(kind, 95, random.Random(seed), cells=cells, reach=reach)
        words, width = sample.words, len(kind.operations[0])
        assert len(words) == len(sample.in_loss) <= 95
        at = [i for i, word in enumerate(words) if word == kind.ask]
        found = list(steps_in(kind, sample))
        assert len(at) == len(found)
        latest = words[1]
        for start, (equals, value, operation) in zip(at, found, strict=True):
            assert equals == start + 2 + width and words[equals] == tasks.EQUALS
            assert words[start + 2 : equals] == kind.operations[operation]
            answer = kind.values[kind.result(value, operation)]
            assert words[equals + 1] == words[equals + 5] == answer
            assert sample.in_loss[start + 1] == (reach == "previous") and sample.in_loss[equals + 1]
            assert not sample.in_loss[equals - 1] and not sample.in_loss[equals + 4]  # the operation, the new name
            distant += words[start + 1] != latest
            new += not kind.is_known(value, operation)
            latest = words[equals + 4]
        steps += len(at)
        assert not any(sample.in_loss[i] for i, word in enumerate(words) if word in tasks.FILLER)
    assert steps > 100
    assert (new > 0) == (cells == "all") and (distant > 0) == (reach == "any")


def test_sums_are_those_of_the_demo() -> None:
    sample = chain_sample(SUMS, 95, random.Random(1), cells="all", reach="any")
    assert list(steps_in(SUMS, sample)) == list(tasks.sums_in(tasks.Sample(sample.words, sample.in_loss)))
    cells = [(a, b) for a in range(10) for b in range(10)]
    assert all(SUMS.is_known(a, b) == tasks.is_known_sum(a, b) for a, b in cells)


def test_rules_are_sums_and_two_tables_that_pretraining_never_shows() -> None:
    assert len(RULES.operations) == 30 and RULES.operations[:10] == SUMS.operations
    cells = [(value, operation) for value in range(10) for operation in range(30)]
    assert sum(RULES.is_known(*cell) for cell in cells) == 75
    assert all(RULES.result(*cell) == SUMS.result(*cell) for cell in cells if cell[1] < 10)
    table = [RULES.result(*cell) for cell in cells if cell[1] >= 10]
    assert set(table) == set(range(10)) and table != [sum(cell) % 10 for cell in cells if cell[1] >= 10]


def test_shuffles_are_the_six_orders_of_three_cups() -> None:
    table = [[SHUFFLES.result(value, turn) for turn in range(6)] for value in range(6)]
    assert all(sorted(row) == list(range(6)) for row in table)
    assert any(table[a][b] != table[b][a] for a in range(6) for b in range(6))  # the order of turns matters
    known = sum(SHUFFLES.is_known(a, b) for a in range(6) for b in range(6))
    assert known == 27


def test_a_chain_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a chain of cups needs at least 21 words, 20 given"):
        chain_sample(SHUFFLES, 20, random.Random(0), cells="all", reach="any")
