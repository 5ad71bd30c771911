"""Build recall samples of an exact number of tokens."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import Haystack, ShortHaystackError
from routeguard.recall.key_words import Split
from routeguard.recall.task import Draft, Material, Task

_FILLERS = (" .", "\n", " a", " the", ".", "a")  # what makes up the last few tokens
_MAX_WORDS_BACK = 40


class ShortLengthError(ValueError):
    """A length cannot hold needles, question and answer."""


@dataclass(frozen=True)
class Sample:
    """One question about one text.

    Attributes:
        task: its task's name.
        length_tokens: the length asked for. The prompt has exactly `length_tokens - reserve_tokens` tokens.
        reserve_tokens: room for the answer.
        depth: the depth asked for, or None.
        index: which of the samples with this task and length it is.
        turns: the conversation without its answer; raw prompts have its turns on lines of their own.
        answer_prefix: how the answer begins.
        prompt_ids: token ids of the prompt, the answer's beginning included.
        answer_ids: token ids of the teacher-forced answer.
        spans: where each value stands in `answer_ids`.
        values: the values asked for.
        depths: where each value stands in the context, 0 to 1.
        others: values in the text that nobody asks for.
        joiner: how the answer separates its values.
    """

    task: str
    length_tokens: int
    reserve_tokens: int
    depth: float | None
    index: int
    turns: tuple[str, ...]
    answer_prefix: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    values: tuple[str, ...]
    depths: tuple[float, ...]
    others: frozenset[str]
    joiner: str

    @property
    def key(self) -> str:
        """Identifies the sample: a hash of its tokens."""
        text = ",".join(map(str, (*self.prompt_ids, -1, *self.answer_ids)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def answer(self) -> str:
        """The answer as text, after its prefix: ` a, b, and c`."""
        *first, last = self.values
        if not first:
            return f" {last}"
        separator = f"{self.joiner} "
        return f" {separator.join(first)}{separator}{'and ' if self.joiner else ''}{last}"


def build_sample(
    task: Task,
    encoder: Encoder,
    *,
    length_tokens: int,
    depth: float | None,
    index: int,
    haystack: Haystack,
    seed: int = 0,
    reserve_tokens: int | None = None,
    split: Split = "measure",
) -> Sample:
    """Build the sample that these arguments name; the same arguments give the same sample.

    Args:
        task: the kind of question.
        encoder: tokenizer, raw or chat.
        length_tokens: tokens of the prompt and the room for the answer together.
        depth: where the (first) value asked for stands, 0 to 1; None for a random place.
        index: which sample of its kind.
        haystack: the prose, for tasks that use it.
        seed: of all randomness.
        reserve_tokens: room for the answer; None: `answer_room`. RULER's own are 128 (needles) and 30 (variables).
        split: which half of the names and values; "replay" is for training data.

    Raises ValueError if the length cannot hold the question (ShortLengthError), or not be met exactly, if the haystack
    is too short, or if the tokenizer lacks words.
    """
    room = answer_room(task, encoder) if reserve_tokens is None else reserve_tokens
    material = Material(haystack, split)
    rng = random.Random(f"{task.name}/{length_tokens}/{depth}/{index}/{seed}/{split}")
    for _ in range(50):
        draft = task.draft(rng, material, depth)
        line = f"{draft.render(0).turns[-1].rsplit(chr(10), 1)[-1]} {draft.answer_prefix}"
        answer_ids, spans = encoder.answer_ids(line, draft.answers, task.joiner)
        if len(answer_ids) <= room:
            break
    else:
        raise ValueError(
            f"reserve_tokens={room} is too little for the answers of {task.name}: {len(answer_ids)} tokens"
        )
    target = length_tokens - room
    encoder.refuse_unknown(encoder.text(draft.render(0).turns, draft.answer_prefix) + _answer_words(draft), task.name)

    def count(num_words: int, extra: str = "") -> int:
        return len(encoder.prompt_ids(encoder.text(draft.render(num_words, extra).turns, draft.answer_prefix)))

    smallest = count(0)
    if smallest > target:
        raise ShortLengthError(
            f"length {length_tokens} is too short for {task.name}: needles and question need {smallest} tokens and the "
            f"answer {room}; ask for at least {smallest + room}"
        )
    rendered = draft.render(*_fit(count, target, smallest, what=f"{task.name} at length {length_tokens}"))
    text = encoder.text(rendered.turns, draft.answer_prefix)
    prompt_ids = encoder.prompt_ids(text)
    encoder.refuse_many_unknown(prompt_ids, f"{task.name} in {haystack.origin}")
    return Sample(
        task=task.name,
        length_tokens=length_tokens,
        reserve_tokens=room,
        depth=depth,
        index=index,
        turns=rendered.turns,
        answer_prefix=draft.answer_prefix,
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
        spans=tuple(spans),
        values=draft.answers,
        depths=rendered.depths,
        others=rendered.others - set(draft.answers),
        joiner=task.joiner,
    )


def answer_room(task: Task, encoder: Encoder) -> int:
    """Room that the answers of a task need: the longest of 24 drawn ones, and a quarter more."""
    from routeguard.recall.haystack import builtin_prose

    if id(task) in encoder.rooms:  # tasks of a user's own need not be hashable
        return encoder.rooms[id(task)][1]
    longest = 0
    for index in range(24):
        draft = task.draft(random.Random(f"room/{index}"), Material(builtin_prose()), None)
        longest = max(longest, len(encoder.answer_ids(draft.answer_prefix, draft.answers, task.joiner)[0]))
    room = longest if longest <= 3 else math.ceil(1.25 * longest)
    encoder.rooms[id(task)] = (task, room)
    return room


def _all_there_is(count: Callable[..., int], target: int, smallest: int, error: ShortHaystackError) -> tuple[int, int]:
    """The whole haystack and its tokens. A guess beyond it is no proof that the length needs more words than it has."""
    tokens = count(error.num_words)
    if tokens < target:
        slope = (tokens - smallest) / error.num_words
        count(max(error.num_words + 1, int((target - smallest) / max(slope, 0.01))))  # raises, with a better estimate
    return error.num_words, tokens


def _answer_words(draft: Draft) -> str:
    return "".join(f" {value}" for value in draft.answers)


def _fit(count: Callable[..., int], target: int, smallest: int, *, what: str) -> tuple[int, str]:
    """Find a number of words, and what to add to them, so that the prompt has exactly `target` tokens.

    Tokens grow nearly in proportion to words: the secant's guess is within a few words after two or three counts, and
    bisection closes the rest.
    """
    low, at_low = 0, smallest
    high: int | None = None
    slope = 1.3
    while high is None or high - low > 1:
        guess = low + max(1, int((target - at_low) / slope))
        if high is not None and guess >= high:
            guess = (low + high) // 2 if high - low > 2 else low + 1
        try:
            tokens = count(guess)
        except ShortHaystackError as error:
            guess, tokens = _all_there_is(count, target, smallest, error)
        slope = max((tokens - smallest) / guess, 0.1)
        if tokens <= target:
            low, at_low = guess, tokens
            if tokens == target:
                return low, ""
        else:
            high = guess
    nearest = at_low
    for words in range(low, max(low - _MAX_WORDS_BACK, -1), -1):
        missing = target - count(words)
        for filler in _FILLERS if missing >= 0 else ():
            tokens = count(words, filler * missing)
            if tokens == target:
                return words, filler * missing
            nearest = tokens if abs(tokens - target) < abs(nearest - target) else nearest
    raise ValueError(
        f"{what}: no text of exactly {target} prompt tokens was found (nearest {nearest}); ask for another length"
    )
