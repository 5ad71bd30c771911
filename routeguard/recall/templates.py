"""RULER's prompt templates, word for word (Apache-2.0, NVIDIA; see NOTICE), so that figures compare.

Their spelling ("assgined") and their grammar ("One of the special magic numbers for ...") are part of the benchmark.
Source: Hsieh et al., RULER, arXiv 2404.06654, as distributed with lm-evaluation-harness 0.4.13 (`tasks/ruler`).
"""

from __future__ import annotations

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
INTRO_ONE = (
    "A special magic {type_needle_v} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {type_needle_v} afterwards."
)
INTRO_MANY = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards."
)
QUESTION_ONE = "What is the special magic {type_needle_v} for {query} mentioned in the provided text?"
QUESTION_MANY = "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
PREFIX_ONE = "The special magic {type_needle_v} for {query} mentioned in the provided text is"
PREFIX_MANY = "The special magic {type_needle_v} for {query} mentioned in the provided text are"
NEEDLE_TOKENS_TO_GENERATE = 128

CHAIN_INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
CHAIN_QUESTION = "Question: Find all variables that are assigned the value {query} in the text above."
CHAIN_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assgined the "
    "value {query}, they are:"
)
CHAIN_START = "VAR {name} = {value}"
CHAIN_HOP = "VAR {name} = VAR {before} "
CHAIN_TOKENS_TO_GENERATE = 30
