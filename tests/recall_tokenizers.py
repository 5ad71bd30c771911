"""Small tokenizers of several kinds, trained in memory on the built-in prose."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from routeguard.recall.haystack import builtin_prose

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@lru_cache
def byte_bpe(vocab_size: int = 800, *, chat: bool = False, ends: bool = False, more: str = "") -> Any:
    """Byte-level BPE, as in GPT-2 or Llama 3; `ends`: with <s> before and </s> after each text; `more` to train on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [_prose(), more],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if ends:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", chat_template=CHAT if chat else None
    )


@lru_cache
def sentencepiece_like(vocab_size: int = 400) -> Any:
    """Metaspace BPE with a blank before each text and <s>, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    alphabet = [chr(c) for c in range(32, 127)] + ["\n"]
    specials = ["<unk>", "<s>", "</s>"]
    core.train_from_iterator(
        [_prose()],
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@lru_cache
def characters() -> Any:
    """One token a character, 95 of them: fits the vocabulary of the zoo's models."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(32, 127) if chr(c) not in "`~^|"] + ["\n"]
    vocabulary = {"<pad>": 0, "</s>": 1, **{c: i for i, c in enumerate(letters, start=2)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def _prose() -> str:
    return " ".join(builtin_prose().words[:6000]) + " The special magic number is hidden. 0123456789 VAR ABC"
