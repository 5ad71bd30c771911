"""Turn turns of text into token ids, raw or through a chat template, with the answer's values as spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_UNKNOWN = 0.05  # share of <unk> in a text, above which it is not in the tokenizer's language


class Encoder:
    """One tokenizer, used one way.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat: whether prompts go through its chat template; raw text otherwise.

    Raises ValueError for what is no tokenizer, if `chat` is asked for and there is no template, and for a tokenizer
    that encodes text to nothing.
    """

    def __init__(self, tokenizer: Any, *, chat: bool = False) -> None:
        if isinstance(tokenizer, str) or not callable(tokenizer):
            raise ValueError(
                f"tokenizer={tokenizer!r} is no tokenizer; give the model's own: "
                "AutoTokenizer.from_pretrained('FOLDER')"
            )
        if chat and not getattr(tokenizer, "chat_template", None):
            raise ValueError("chat=True, but this tokenizer has no chat template; use chat=False for raw text")
        self.tokenizer = tokenizer
        self.chat = chat
        self.rooms: dict[int, tuple[Any, int]] = {}  # `answer_room` by id of the task, which is kept alive with it
        plain = tokenizer("a", add_special_tokens=False).input_ids
        if not plain:
            raise ValueError("this tokenizer encodes text to no tokens at all: its files are missing or empty")
        special = list(tokenizer("a", add_special_tokens=True).input_ids)
        self._num_after = 0  # special tokens that a tokenizer puts after a text; a prompt must not have them
        while self._num_after < len(special) and special[-1 - self._num_after] not in plain:
            self._num_after += 1

    def text(self, turns: Sequence[str], answer_prefix: str) -> str:
        """The prompt as text: turns joined by line breaks, or by the chat template, and the answer's beginning."""
        if not self.chat:
            return "\n".join(turns) + (" " if _is_open(turns[-1]) else "") + answer_prefix
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        messages.append({"role": "assistant", "content": answer_prefix})
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        return text

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts before a text and without what it puts after."""
        ids = list(self.tokenizer(text, add_special_tokens=not self.chat, verbose=False).input_ids)
        return ids[: len(ids) - self._num_after] if self._num_after and not self.chat else ids

    def answer_ids(self, prompt: str, values: Sequence[str], joiner: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of ` a, b, and c` as they follow `prompt`, and where each value stands among them.

        A blank that is a token of its own is no part of a value.
        """
        text = prompt.rsplit("\n", 1)[-1]
        seen = self._plain(text)
        ids: list[int] = []
        spans = []
        for i, value in enumerate(values):
            before = "" if i == 0 else f"{joiner} and" if joiner and i == len(values) - 1 else joiner
            for piece in (before, f" {value}"):
                if not piece:
                    continue
                text += piece
                whole = self._plain(text)
                new = whole[len(seen) :] if whole[: len(seen)] == seen else self._plain(piece)
                seen = whole
                if piece is not before:
                    blanks = self._num_blank(new)
                    spans.append((len(ids) + blanks, len(ids) + len(new)))
                ids += new
        return ids, spans

    def _num_blank(self, ids: Sequence[int]) -> int:
        """How many tokens at the beginning are nothing but blanks."""
        blanks = 0
        while blanks < len(ids) - 1 and not self.tokenizer.decode([ids[blanks]]).strip():
            blanks += 1
        return blanks

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def refuse_unknown(self, text: str, what: str) -> None:
        """Raise ValueError if the tokenizer has no tokens for some of a text's words."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if unknown is None or unknown not in self._plain(text):
            return
        words = [word for word in dict.fromkeys(text.split()) if unknown in self._plain(f" {word}")]
        raise ValueError(
            f"{what} needs words that this tokenizer does not know, such as {', '.join(map(repr, words[:5]))}: it "
            "would read <unk> in their place. Choose a task, or a haystack, in the tokenizer's own language"
        )

    def refuse_many_unknown(self, ids: Sequence[int], what: str) -> None:
        """Raise ValueError if more than 5 % of a prompt's tokens stand for words that the tokenizer does not know."""
        share = share_unknown(self.tokenizer, ids)
        if share > MOST_UNKNOWN:
            raise ValueError(
                f"{what}: {share:.0%} of the prompt's tokens are <unk>, so the text is not in this tokenizer's "
                "language; give a haystack that is"
            )


def share_unknown(tokenizer: Any, ids: Sequence[int]) -> float:
    """The share of tokens, 0 to 1, that stand for words that the tokenizer does not know."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return 0.0 if unknown is None or not ids else list(ids).count(unknown) / len(ids)


def _is_open(turn: str) -> bool:
    return not turn.endswith((" ", "\n"))
