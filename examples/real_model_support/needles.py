"""Needle tests in prose from Python's own documentation, with keys that resemble each other."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from statistics import fmean as mean

ADJECTIVES = ("amber", "brisk", "cobalt", "dusty", "eager", "frosty", "gentle", "hollow", "ivory", "jolly")
NOUNS = ("falcon", "otter", "lantern", "harbor", "violin", "meadow", "compass", "glacier", "saddle", "teapot")
KINDS = ("single", "multikey", "dense")


@dataclass(frozen=True)
class Haystack:
    """A context as token ids, and the (key, value) pairs that will be asked about it."""

    context_ids: tuple[int, ...]
    asked: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cell:
    """Recall for one kind of needle at one length: means over the questions, and per haystack for paired comparison."""

    kind: str
    length_tokens: int
    num_questions: int
    value_accuracy: float
    token_accuracy: float
    value_nll: float
    haystack_accuracy: tuple[float, ...]
    haystack_nll: tuple[float, ...]


def prose_sentences() -> list[str]:
    """Return the running prose of `pydoc_data.topics` as sentences: no code, tables, lists or grammar rules."""
    from pydoc_data.topics import topics

    sentences = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            text = " ".join(paragraph.split())
            plain = not paragraph.startswith((" ", "*", "+", "-")) and "::=" not in text and "***" not in text
            if plain and len(text.split()) >= 20:
                sentences += [f"{part.rstrip('.')}." for part in text.split(". ") if len(part.split()) >= 5]
    return sentences


def needle(key: str, value: str) -> str:
    """Return the sentence that hides a value in the haystack."""
    return f"The access code of {key} is {value}."


def build_haystack(tokenizer, *, kind: str, length_tokens: int, seed: int, num_asked: int = 8) -> Haystack:
    """Build one context of at most `length_tokens` tokens (question and answer included).

    Kinds: `single` hides one 7-digit value in prose; `multikey` hides `num_asked` values of 8 hex digits in prose, with
    keys that share their words, and asks for each; `dense` has no prose: every line is a needle, `num_asked` are asked.
    Raises ValueError for an unknown kind, and for a length that cannot hold the needles.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of needle {kind!r}; there are {KINDS}")
    rng = random.Random(f"{kind}/{length_tokens}/{seed}")
    keys = [f"the {adjective} {noun}" for adjective, noun in itertools.product(ADJECTIVES, NOUNS)]
    if kind == "multikey":  # a small grid of words, so that each word of a key occurs in other keys as well
        adjectives, nouns = rng.sample(ADJECTIVES, 3), rng.sample(NOUNS, 3)
        keys = [f"the {adjective} {noun}" for adjective, noun in itertools.product(adjectives, nouns)]
    rng.shuffle(keys)

    def value() -> str:
        return f"{rng.randrange(10**6, 10**7)}" if kind == "single" else f"{rng.getrandbits(32):08x}"

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    budget = length_tokens - 1 - 40  # the start mark, and room for the question and its answer
    if kind == "dense":
        pairs, lines = [], []
        for key in keys:
            pair = (key, value())
            line = ids(needle(*pair) + "\n")
            if sum(map(len, lines)) + len(line) > budget:
                break
            pairs.append(pair)
            lines.append(line)
        asked = rng.sample(pairs, min(num_asked, len(pairs)))
    else:
        asked = [(key, value()) for key in keys[: 1 if kind == "single" else num_asked]]
        hidden = [ids(needle(*pair) + "\n") for pair in asked]
        sentences = prose_sentences()
        position, room = rng.randrange(len(sentences)), budget - sum(map(len, hidden))
        lines = []
        while len(sentence := ids(sentences[position % len(sentences)] + "\n")) <= room:
            lines.append(sentence)
            room, position = room - len(sentence), position + 1
        for line in hidden:
            lines.insert(rng.randrange(len(lines) + 1), line)
    if len(asked) < (1 if kind == "single" else num_asked) or sum(map(len, lines)) > budget:
        raise ValueError(f"{length_tokens} tokens are too few for the {kind} needles; ask for a longer context")
    return Haystack((tokenizer.bos_token_id, *itertools.chain.from_iterable(lines)), tuple(asked))


def score_haystack(model, tokenizer, haystack: Haystack) -> list[tuple[bool, float, float]]:
    """Return (whole value right, share of its tokens right, mean nats a token) for each question about one context.

    The context is read once; the questions follow as a batch on its repeated cache. Teacher forced: a value is right
    when each of its tokens is the most likely one, which is exactly when greedy decoding would write it.
    """
    import torch
    from transformers import DynamicCache

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    questions = [ids(f"The access code of {key} is") for key, _ in haystack.asked]
    values = [ids(f" {value}") for _, value in haystack.asked]
    rows = [question + value for question, value in zip(questions, values, strict=True)]
    width = max(map(len, rows))
    kept = width - min(map(len, questions)) + 1  # logits from the shortest question's last token onward
    batch = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    model.eval()
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=torch.tensor([haystack.context_ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(len(rows))
        logits = model(input_ids=batch, past_key_values=cache, logits_to_keep=kept).logits.float()
    scores = []
    for row, question, value in zip(logits, questions, values, strict=True):
        first = len(question) - 1 - (width - kept)
        predicted = row[first : first + len(value)]
        target = torch.tensor(value)
        right = predicted.argmax(-1) == target
        nll = torch.nn.functional.cross_entropy(predicted, target).item()
        scores.append((bool(right.all()), right.float().mean().item(), nll))
    return scores


def measure_recall(model, tokenizer, *, lengths: tuple[int, ...], num_haystacks: int, kinds=KINDS) -> list[Cell]:
    """Measure every kind of needle at every length; the same seeds give the same contexts at every stage."""
    cells = []
    for kind, length in itertools.product(kinds, lengths):
        haystacks = [
            build_haystack(tokenizer, kind=kind, length_tokens=length, seed=seed) for seed in range(num_haystacks)
        ]
        by_haystack = [score_haystack(model, tokenizer, haystack) for haystack in haystacks]
        exact, tokens, nll = zip(*itertools.chain.from_iterable(by_haystack), strict=True)
        cells.append(
            Cell(
                kind=kind,
                length_tokens=length,
                num_questions=len(exact),
                value_accuracy=mean(exact),
                token_accuracy=mean(tokens),
                value_nll=mean(nll),
                haystack_accuracy=tuple(mean(score[0] for score in scores) for scores in by_haystack),
                haystack_nll=tuple(mean(score[2] for score in scores) for scores in by_haystack),
            )
        )
    return cells
