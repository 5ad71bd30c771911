"""A prompt with a needle, as tokens, and where in it needle and question stand: something to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routeguard.recall import templates
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack import as_haystack
from routeguard.recall.registry import find_task
from routeguard.recall.sample import Sample, build_sample
from routeguard.recall.task import Task

if TYPE_CHECKING:
    from torch import Tensor

# Where a needle may begin: as RULER's do, as the demo's do, else after a sentence.
_NEEDLE_START = re.compile(rf"(?={templates.NEEDLE.split('{')[0]})| (?=let )|\n|[.!?] |[。！？؟।] ?")


@dataclass(frozen=True, eq=False)
class NeedlePrompt:
    """A recall sample up to the token that has to predict the answer.

    Attributes:
        sample: the question.
        input_ids: [1, tokens]. What the last token predicts is the first token of the value asked for.
        marks: tokens from start to stop by name: the needle ("needle 1", "needle 2", ... where several values are
            asked for, in the order of the answer) and the question with the beginning of the answer.
    """

    sample: Sample
    input_ids: Tensor
    marks: dict[str, tuple[int, int]]


def needle_prompt(
    tokenizer: Any,
    *,
    task: str | Task = "niah_single_2",
    length_tokens: int = 2048,
    depth: float = 0.5,
    seed: int = 0,
    chat: bool = False,
    haystack: Any = None,
) -> NeedlePrompt:
    """Make one sample of a recall task and say where its needle and question are, for `attention_map` and its marks.

    Args:
        tokenizer: the model's.
        task: a recall task, as in `measure_recall`.
        length_tokens: prompt and room for the answer together.
        depth: where the (first) value asked for stands, 0 to 1.
        seed: of names, values and surroundings.
        chat: use the tokenizer's chat template; raw text by default.
        haystack: as in `measure_recall`.

    Raises ValueError for a depth outside of 0 to 1, and for what `measure_recall` refuses.
    """
    import torch

    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth} is not between 0 (the beginning) and 1 (the end)")
    encoder = Encoder(tokenizer, chat=chat)
    sample = build_sample(
        find_task(task),
        encoder,
        length_tokens=length_tokens,
        depth=depth,
        index=0,
        haystack=as_haystack(haystack),
        seed=seed,
    )
    text = encoder.text(sample.turns, sample.answer_prefix)
    ids = [*sample.prompt_ids, *sample.answer_ids[: sample.spans[0][0]]]
    question = _question_start(text, sample)
    marks = {name: _tokens(encoder, text, start, stop) for name, start, stop in _needles(text[:question], sample)}
    marks["question"] = (_tokens(encoder, text, question, len(text))[0], len(ids))
    return NeedlePrompt(sample, torch.tensor([ids]), marks)


def _question_start(text: str, sample: Sample) -> int:
    """Where the last line of the last turn begins; in a prompt of one line, the beginning of the answer."""
    *lines, question = sample.turns[-1].rstrip().split("\n")
    return text.rindex(question if lines or len(sample.turns) > 1 else sample.answer_prefix)


def _needles(text: str, sample: Sample) -> Iterator[tuple[str, int, int]]:
    """Name, first character and end of the needle of each value: its sentence up to the value's end."""
    for number, (value, depth) in enumerate(zip(sample.values, sample.depths, strict=True), start=1):
        ends = [found.end() for found in re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text)]
        starts = [_sentence_start(text[: end - len(value)]) for end in ends]
        if not ends:
            raise ValueError(f"{sample.task}: the value {value!r} does not stand in the text; nothing to mark")
        # Short values can stand there twice: the one where the sample says that it stands.
        _, start, end = min(
            (abs(start - depth * len(text)), start, end) for start, end in zip(starts, ends, strict=True)
        )
        yield ("needle" if len(sample.values) == 1 else f"needle {number}", start, end)


def _sentence_start(text: str) -> int:
    """Where the sentence begins that `text` breaks off in."""
    return max((found.end() for found in _NEEDLE_START.finditer(text)), default=0)


def _tokens(encoder: Encoder, text: str, start: int, stop: int) -> tuple[int, int]:
    """First and end of the tokens that hold the characters from start to stop."""
    if getattr(encoder.tokenizer, "is_fast", False):
        offsets = encoder.tokenizer(
            text, add_special_tokens=not encoder.chat, return_offsets_mapping=True, verbose=False
        ).offset_mapping
        inside = [number for number, (a, b) in enumerate(offsets) if a < stop and b > start]
        return inside[0], inside[-1] + 1
    first = len(encoder.prompt_ids(text[:start].rstrip()))
    return first, len(encoder.prompt_ids(text[:stop]))
