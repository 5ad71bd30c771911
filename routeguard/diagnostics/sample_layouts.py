"""Which tokens and labels a training sample becomes: plain text, chats, or a prompt with its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IGNORED = -100  # label of a token that the loss leaves out
PROMPTS = ("prompt", "instruction", "question", "query")
ANSWERS = ("completion", "response", "output", "answer")
LONE = ("content", *ANSWERS)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Document:
    """A sample as tokens.

    Attributes:
        ids: token ids, as training would see them.
        labels: like ids, −100 where the loss does not count.
        from_text: the tokenizer read a plain text (not turns of a chat, nor ids).
    """

    ids: list[int]
    labels: list[int]
    from_text: bool


def sample_document(
    tokenizer: Any, sample: Mapping[str, Any], *, column: str | None = None, with_labels: bool = True
) -> Document:
    """Tokens of a sample, as training would see them, and which of them the loss counts.

    A sample is read, in this order, from `column` if given; `input_ids`; `messages` or `conversations` (role/content or
    ShareGPT's from/value; chat template, or contents joined by newlines where the tokenizer has none); `prompt` with
    `completion`, end to end; `text`; another prompt with its answer (instruction, input, output, say), joined by
    newlines; an only column of text called content, completion, response, output or answer.

    Labels are a `labels` field, or the prompt left out (−100); all count with `column` or without `with_labels`. A
    prompt ends with its last character (fast tokenizers), or where the tokens of prompt and answer together part from
    those of the prompt alone (chats, slow tokenizers: there the prompt is tokenised again).

    Raises ValueError for a sample of another layout.
    """
    prompt, whole = _read(sample, column)
    given = sample.get("labels") if with_labels and column is None else None
    if given or not with_labels or prompt is None:
        ids = _ids(tokenizer, whole)
        labels = _numbers(given) if given else ids
    else:
        ids, same = _with_prompt(tokenizer, prompt, whole)
        labels = [IGNORED] * same + ids[same:]
    return Document(ids, labels, isinstance(whole, str))


def _with_prompt(tokenizer: Any, prompt: Any, whole: Any) -> tuple[list[int], int]:
    """Tokens of prompt and answer, and how many of them are the prompt's."""
    if isinstance(whole, str) and getattr(tokenizer, "is_fast", False):
        found = tokenizer(whole, return_offsets_mapping=True)
        ends = [end for _, end in found["offset_mapping"]]
        same = next((number for number, end in enumerate(ends) if end > len(prompt)), len(ends))
        return list(found["input_ids"]), same
    ids = _ids(tokenizer, whole)
    return ids, _common(_ids(tokenizer, prompt, before_answer=True), ids)


def _read(sample: Mapping[str, Any], column: str | None) -> tuple[Any, Any]:
    """The part of a sample that the loss leaves out, if any, and the whole: text, turns or token ids."""
    if column is not None:
        if sample.get(column) is None:
            raise ValueError(f"no column {column!r} in a sample; it has {list(sample)}")
        return None, sample[column]
    filled = {name for name, value in sample.items() if value is not None and value != []}
    for name in ("input_ids", "messages", "conversations"):
        if name in filled:
            if isinstance(sample[name], str):
                raise ValueError(f"a sample's {name} is a text; give a list, or the text in a column text")
            return None, sample[name]
    if {"prompt", "completion"} <= filled:
        return _joined(sample["prompt"], sample["completion"], "")
    if "text" in filled:
        return None, sample["text"]
    prompts, answers = ([name for name in names if name in filled] for names in (PROMPTS, ANSWERS))
    if len(prompts) == len(answers) == 1:
        prompt = sample[prompts[0]]
        if isinstance(prompt, str) and isinstance(sample.get("input"), str) and sample["input"]:
            prompt = f"{prompt}\n{sample['input']}"
        return _joined(prompt, sample[answers[0]], "\n")
    texts = [name for name in sample if name in filled and isinstance(sample[name], (str, list))]
    if len(texts) == 1 and texts[0] in LONE:
        return None, sample[texts[0]]
    raise ValueError(
        f"cannot tell what training reads of a sample with the columns {', '.join(sample)}; expected input_ids, "
        "messages, conversations, prompt with completion, instruction with output, or text: name one column "
        "(column=, --column)"
    )


def _joined(prompt: Any, answer: Any, between: str) -> tuple[Any, Any]:
    if isinstance(prompt, str) and isinstance(answer, str):
        return prompt + between, prompt + between + answer
    parts = (
        [{"role": role, "content": part}] if isinstance(part, str) else list(part)
        for part, role in ((prompt, "user"), (answer, "assistant"))
    )
    first, second = parts
    return first, first + second


def _ids(tokenizer: Any, value: Any, *, before_answer: bool = False) -> list[int]:
    if isinstance(value, str):
        return list(tokenizer(value)["input_ids"])
    if not isinstance(value, Sequence):
        raise ValueError(f"a sample's column holds {type(value).__name__}; give text, turns of a chat or token ids")
    if not value or not isinstance(value[0], Mapping):
        return _numbers(value)
    turns = [_turn(turn) for turn in value]
    if getattr(tokenizer, "chat_template", None):
        generate = before_answer and turns[-1]["role"] != "assistant"
        found = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False, add_generation_prompt=generate)
        return [int(token) for token in found]
    return list(tokenizer("\n".join(str(turn["content"] or "") for turn in turns))["input_ids"])


def _numbers(values: Sequence[Any]) -> list[int]:
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        wrong = next(value for value in values if not isinstance(value, int))
        raise ValueError(f"a sample's token ids or labels hold {wrong!r}; give whole numbers") from None


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    if "role" in turn and "content" in turn:
        return {name: value for name, value in turn.items() if value is not None or name == "content"}
    if "from" in turn and "value" in turn:
        role = str(turn["from"])
        return {"role": _ROLES.get(role.lower(), role), "content": turn["value"]}
    raise ValueError(f"a turn of a chat has the fields {', '.join(turn)}; expected role and content, or from and value")


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return number
    return min(len(first), len(second))
