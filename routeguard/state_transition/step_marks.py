"""The step tokens of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routeguard.state_transition.config import StateTransitionConfig


@dataclass(frozen=True)
class StepMarks:
    """The step tokens, as text and as ids: one start for each thinking pattern, and one end.

    Attributes:
        starts, end: as text, "<|step_0|>" and so on, "<|step_end|>".
        start_token_ids, end_token_id: what the tokenizer makes of them.
    """

    starts: tuple[str, ...]
    end: str
    start_token_ids: tuple[int, ...]
    end_token_id: int

    def config(self, **settings: Any) -> StateTransitionConfig:
        """`StateTransitionConfig` with these tokens and further settings."""
        return StateTransitionConfig(start_token_ids=self.start_token_ids, end_token_id=self.end_token_id, **settings)

    def check(self, tokenizer: Any) -> None:
        """Raise ValueError where a tokenizer does not read each of these as the one token that it is here."""
        for mark, own in zip((*self.starts, self.end), (*self.start_token_ids, self.end_token_id), strict=True):
            found = list(tokenizer(f"a{mark}a", add_special_tokens=False).input_ids)
            if own not in found:
                raise ValueError(
                    f"the tokenizer reads {mark!r} as {found} and not as a token of its own ({own}); give it the step "
                    "tokens by add_step_tokens(tokenizer)"
                )

    def wrap(self, step: str, pattern: int = 0) -> str:
        """A step between its tokens. Raises ValueError for a step that holds such tokens, and an unknown pattern."""
        inside = [mark for mark in (*self.starts, self.end) if mark in step]
        if inside:
            raise ValueError(f"a step holds the step tokens {inside} already: {step[:60]!r}")
        if not 0 <= pattern < len(self.starts):
            raise ValueError(f"pattern {pattern} has no start token; there are {len(self.starts)}")
        return f"{self.starts[pattern]}{step}{self.end}"


def add_step_tokens(tokenizer: Any, num_patterns: int = 1) -> StepMarks:
    """Give a tokenizer the step tokens, in place; those that it has already stay.

    Save it with the model: it is what `generate` and a later run need.

    Args:
        tokenizer: of the base model.
        num_patterns: how many start tokens.

    Raises ValueError where the tokenizer cuts them in pieces.
    """
    if num_patterns < 1:
        raise ValueError(f"num_patterns must be at least 1; got {num_patterns}")
    marks = [*(f"<|step_{i}|>" for i in range(num_patterns)), "<|step_end|>"]
    known = tokenizer.get_vocab()
    missing = [mark for mark in marks if mark not in known]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)
    ids = [int(tokenizer.convert_tokens_to_ids(mark)) for mark in marks]
    found = StepMarks(tuple(marks[:-1]), marks[-1], tuple(ids[:-1]), ids[-1])
    found.check(tokenizer)
    return found
