"""The demo's tiny hybrid model and its tokenizer: build them from nothing, or load the pretrained copy that ships."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from routeguard.demo import tasks

WEIGHTS = Path(__file__).parent / "weights"
FULL_ATTENTION_LAYERS = (2, 5)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Make the word-level tokenizer of `tasks.VOCABULARY`; it puts `<s>` before each text."""
    ids = {word: i for i, word in enumerate(tasks.VOCABULARY)}
    core = Tokenizer(models.WordLevel(ids, unk_token=tasks.UNK))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=f"{tasks.BOS} $A", special_tokens=[(tasks.BOS, ids[tasks.BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=tasks.PAD,
        bos_token=tasks.BOS,
        eos_token=tasks.EOS,
        unk_token=tasks.UNK,
        model_max_length=4096,
    )


def build_model(*, seed: int = 0) -> Lfm2ForCausalLM:
    """Make the untrained model: an LFM2 of about 245K parameters, six layers, full attention in two of them."""
    torch.manual_seed(seed)
    config = Lfm2Config(
        vocab_size=len(tasks.VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        full_attn_idxs=list(FULL_ATTENTION_LAYERS),
        block_auto_adjust_ff_dim=False,
        max_position_embeddings=4096,
        pad_token_id=tasks.VOCABULARY.index(tasks.PAD),
        bos_token_id=tasks.VOCABULARY.index(tasks.BOS),
        eos_token_id=tasks.VOCABULARY.index(tasks.EOS),
    )
    return Lfm2ForCausalLM(config).float()


def load_model() -> Lfm2ForCausalLM:
    """Load the pretrained model that ships with the package, in fp32 on the CPU."""
    with _no_loading_bar():
        model: Lfm2ForCausalLM = Lfm2ForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    return model


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Load the tokenizer that ships with the package."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(WEIGHTS)
    return tokenizer


@contextmanager
def _no_loading_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
