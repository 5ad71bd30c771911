"""Which tokens and labels a training sample becomes: plain text, chats, or a prompt with its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from routeguard.diagnostics.texts import refuse_many_unknown

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


def sample_tokens(
    tokenizer: Any, samples: Iterable[Mapping[str, Any]], *, column: str | None = None
) -> list[list[int]]:
    """Token ids of each sample, as training would see them.

    A sample is read, in this order, from `column` if given; `input_ids`; `messages` or `conversations` (role/content or
    ShareGPT's from/value; chat template, or contents joined by newlines where the tokenizer has none); `prompt` with
    `completion`, end to end; `text`; another prompt with its answer (instruction, input, output, say), joined by
    newlines; an only column of text called content, completion, response, output or answer.

    Raises ValueError for a sample of another layout, and for texts that the tokenizer does not know.
    """
    parts = [_read(sample, column)[1] for sample in samples]
    documents = [_ids(tokenizer, part) for part in parts]
    texts = [ids for ids, part in zip(documents, parts, strict=True) if isinstance(part, str)]
    refuse_many_unknown(tokenizer, [token for ids in texts for token in ids])
    return documents


def sample_labels(
    tokenizer: Any, samples: Sequence[Mapping[str, Any]], documents: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """Labels of `sample_tokens`' documents: a `labels` field, or prompts left out (−100); None where all count.

    A prompt ends where the tokens of prompt and answer together part from those of the prompt alone.
    """
    found = []
    for sample, document in zip(samples, documents, strict=True):
        if sample.get("labels"):
            found.append(_numbers(sample["labels"]))
            continue
        prompt, _ = _read(sample, None)
        same = 0 if prompt is None else _common(_ids(tokenizer, prompt, before_answer=True), document)
        found.append([IGNORED] * same + list(document[same:]))
    return None if all(list(a) == list(b) for a, b in zip(found, documents, strict=True)) else found


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
