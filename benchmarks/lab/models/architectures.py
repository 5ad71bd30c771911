"""The lab's architectures: full attention in two layers of six, something else between; in the control in all six."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.lab.language.words import VOCABULARY
from routeguard.demo import tasks

NUM_LAYERS = 6
FULL_ATTENTION_LAYERS = (2, 5)
WINDOW = 8  # of the sliding layers: shorter than a chain's look-ups
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": VOCABULARY.index(tasks.PAD),
    "bos_token_id": VOCABULARY.index(tasks.BOS),
    "eos_token_id": VOCABULARY.index(tasks.EOS),
}


@dataclass(frozen=True)
class Architecture:
    """One architecture of the lab.

    Attributes:
        name: as on the command line and in results.
        title: as in tables.
        between: what lies between the full-attention layers.
        build: makes the untrained model; the caller sets the seed.
        pretrain_steps: optimizer steps of pretraining.
        pretrain_rate: its learning rate.
        fine_tune_steps, fine_tune_rate: of fine-tuning: about as many steps as plain fine-tuning takes to learn the
            main chain, at a rate at which it still recalls something.
        lengths: context lengths in tokens at which recall is tested; the last one is what plots and claims use.
    """

    name: str
    title: str
    between: str
    build: Callable[[], PreTrainedModel]
    pretrain_steps: int = 1800
    pretrain_rate: float = 3e-3
    fine_tune_steps: int = 300
    fine_tune_rate: float = 2e-3
    lengths: tuple[int, ...] = (128, 256, 512, 1024)

    def untrained(self, seed: int) -> PreTrainedModel:
        """The model with weights drawn from the seed, in fp32."""
        torch.manual_seed(seed)
        return self.build().float()


def _kinds(other: str) -> list[str]:
    return ["full_attention" if i in FULL_ATTENTION_LAYERS else other for i in range(NUM_LAYERS)]


def _lfm2() -> PreTrainedModel:
    full = list(FULL_ATTENTION_LAYERS)
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, full_attn_idxs=full, block_auto_adjust_ff_dim=False))


def _qwen3_next() -> PreTrainedModel:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            layer_types=_kinds("linear_attention"),
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            num_experts=0,  # dense, so there is no router to balance either
            router_aux_loss_coef=0.0,
            partial_rotary_factor=0.5,
        )
    )


def _bamba() -> PreTrainedModel:
    return BambaForCausalLM(
        BambaConfig(
            **SIZES,
            attn_layer_indices=list(FULL_ATTENTION_LAYERS),
            mamba_n_heads=4,
            mamba_d_state=16,
            mamba_chunk_size=16,
            num_logits_to_keep=None,
        )
    )


def _gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, head_dim=16, query_pre_attn_scalar=16, layer_types=_kinds("sliding_attention"),
            sliding_window=WINDOW,
        )
    )  # fmt: skip


def _qwen3() -> PreTrainedModel:
    # Faster rotation than usual: without layers that mix neighbours, it has to learn from it what stands next to what.
    rotary = {"rope_type": "default", "rope_theta": 1000.0}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, rope_parameters=rotary))


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("lfm2", "LFM2", "short convolutions", _lfm2, pretrain_steps=2600),
        Architecture(
            "qwen3_next", "Qwen3-Next", "gated delta rule", _qwen3_next, pretrain_steps=1300, fine_tune_rate=1e-3
        ),
        Architecture("bamba", "Bamba", "Mamba-2", _bamba, fine_tune_steps=400, fine_tune_rate=1e-3),
        Architecture(
            "gemma3",
            "Gemma-3",
            f"sliding attention over {WINDOW} tokens",
            _gemma3,
            pretrain_steps=3000,
            fine_tune_rate=1e-3,
        ),
        Architecture(
            "qwen3",
            "Qwen3",
            "nothing: all layers attend fully (control)",
            _qwen3,
            pretrain_steps=2400,
            pretrain_rate=1.5e-3,
            fine_tune_steps=400,
            fine_tune_rate=7e-4,
            lengths=(128, 256),  # beyond what it was pretrained on it never recalled
        ),
    )
}
MAIN_ARCHITECTURE = "lfm2"
