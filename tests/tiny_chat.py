"""A tiny random model together with a tokenizer that has a chat template, for tests that start from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.recall_tokenizers import byte_bpe


def tiny_chat(model_class: Any, **fields: Any) -> tuple[Any, Any]:
    """(model, tokenizer): two layers, 32 channels, float32, unless `fields` of its config say otherwise."""
    tokenizer = byte_bpe(chat=True)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **fields,
    }
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = model_class.config_class(vocab_size=len(tokenizer), **ids, **shape)
    return model_class(config).float(), tokenizer


def save_both(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
