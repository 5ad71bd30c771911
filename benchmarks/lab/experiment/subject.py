"""The pretrained model that an experiment starts from, and what is known of it before any fine-tuning."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.lab.conditions.repair import Heads
from benchmarks.lab.language.needles import DEVELOPMENT
from benchmarks.lab.language.words import build_tokenizer
from benchmarks.lab.measuring.scores import recall
from benchmarks.lab.models.architectures import Architecture
from benchmarks.lab.models.weights import BUILD, folder_of, load
from routeguard.diagnostics.importance import head_importance
from routeguard.storage.durable import write_json

HEAD_CHOICE_TOKENS = 256


@dataclass(frozen=True)
class Subject:
    """A pretrained model by its folder.

    Attributes:
        architecture: which.
        model_seed: seed of its pretraining.
        build: the folder that holds everything of the lab that is not kept in the repository.
    """

    architecture: Architecture
    model_seed: int = 0
    build: Path = BUILD

    @property
    def folder(self) -> Path:
        return folder_of(self.architecture, self.model_seed, self.build)

    def model(self) -> PreTrainedModel:
        """A fresh copy."""
        return load(self.folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return build_tokenizer()

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Its parameters by name."""
        return {name: parameter.detach() for name, parameter in self.model().named_parameters()}

    @cached_property
    def digest(self) -> str:
        """First digits of the SHA-256 of its weights."""
        return hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()[:12]

    @cached_property
    def head_order(self) -> tuple[tuple[int, int], ...]:
        """(layer, head) of every full-attention head, the one that recall needs most first; measured once, and kept.

        The score is recall of the development needles before fine-tuning.
        """
        kept = self.folder / f"head_order_{self.digest}.json"
        if not kept.is_file():
            torch.set_num_threads(1)
            ranking = head_importance(
                self.model(),
                lambda model: recall(
                    model,
                    self.tokenizer,
                    DEVELOPMENT,
                    HEAD_CHOICE_TOKENS,
                    num_samples=16,
                    seed="heads",
                ),
            ).ranking
            write_json(kept, [[entry.layer, entry.head, entry.importance] for entry in ranking])
        return tuple((layer, head) for layer, head, _ in json.loads(kept.read_text(encoding="utf-8")))

    def top_heads(self, count: int) -> Heads:
        """Layer to those of its heads that are among the first `count` of `head_order`."""
        found: dict[int, tuple[int, ...]] = {}
        for layer, head in self.head_order[:count]:
            found[layer] = tuple(sorted((*found.get(layer, ()), head)))
        return found
