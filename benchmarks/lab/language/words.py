"""The words of the lab's language: those of the demo, and more names, values and markers for further kinds."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from routeguard.demo import tasks
from routeguard.demo.model import build_tokenizer as demo_tokenizer

CODES = tuple(f"c{i:02d}" for i in range(40))
TAGS = tuple(f"t{i:02d}" for i in range(40))
PLACES = tuple(f"p{i:02d}" for i in range(40))
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "brown", "pink", "grey", "purple")
LETTERS = tuple("ABCDEFGHIJ")
CUPS = tuple(f"s{i}" for i in range(6))
TURNS = tuple(f"u{i}" for i in range(6))
PUT, GET, PIN, FIND, OWN, WHO, HOLD, TURN = "put", "get", "pin", "find", "own", "who", "hold", "turn"

NEW_WORDS = (PUT, GET, PIN, FIND, OWN, WHO, HOLD, TURN, *CODES, *TAGS, *PLACES, *COLOURS, *LETTERS, *CUPS, *TURNS)
VOCABULARY = (*tasks.VOCABULARY, *NEW_WORDS)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """The demo's word-level tokenizer with the lab's further words; one word is one token."""
    tokenizer = demo_tokenizer()
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in NEW_WORDS])
    return tokenizer
