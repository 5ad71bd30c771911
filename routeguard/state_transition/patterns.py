"""Thinking patterns: clusters of steps by what the model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routeguard.recall.quiet import undisturbed
from routeguard.routes.wording import as_printed

NUM_PATTERNS = 128  # the paper's


@dataclass(frozen=True)
class Patterns:
    """Clusters of steps.

    Attributes:
        centers: [patterns, width], of unit length.
        labels: [steps], the pattern of each step that they were made from.
    """

    centers: NDArray[np.float32]
    labels: NDArray[np.int64]

    @property
    def num_patterns(self) -> int:
        return len(self.centers)

    def of(self, embeddings: NDArray[np.float32]) -> NDArray[np.int64]:
        """The nearest pattern of each embedding [steps, width], by cosine; ValueError for those of another width."""
        if embeddings.shape[1:] != self.centers.shape[1:]:
            raise ValueError(
                f"the patterns were made from embeddings of width {self.centers.shape[1]}, these have the shape "
                f"{embeddings.shape}: they belong to another model; cluster its steps anew"
            )
        nearest: NDArray[np.int64] = np.argmax(_unit(embeddings) @ self.centers.T, axis=1)
        return nearest

    def __str__(self) -> str:
        sizes = np.bincount(self.labels, minlength=self.num_patterns)
        return (
            f"{self.num_patterns} thinking patterns over {len(self.labels)} steps; the largest has {sizes.max()}, the "
            f"smallest {sizes.min()}"
        )

    _repr_pretty_ = as_printed


@torch.no_grad()
def embed_steps(model: Any, tokenizer: Any, steps: Sequence[str], *, max_tokens: int = 512) -> NDArray[np.float32]:
    """Mean of the model's last hidden states over each step: [steps, width]; the model is left as it was.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        steps: texts; an empty one is refused.
        max_tokens: read of each at most.

    Source: arXiv 2602.01198 clusters step embeddings; which ones is not said, the mean is ours.
    """
    device = next(model.parameters()).device
    found = []
    with undisturbed(model):
        for step in steps:
            ids = tokenizer(step, truncation=True, max_length=max_tokens).input_ids
            if not ids:
                raise ValueError(f"step {step!r} has no tokens")
            tokens = torch.tensor([ids], device=device)
            hidden = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states[-1]
            found.append(hidden[0].float().mean(0).cpu().numpy())
    return np.stack(found) if found else np.zeros((0, 0), dtype=np.float32)


def cluster_patterns(embeddings: NDArray[np.float32], *, num_patterns: int = NUM_PATTERNS, seed: int = 0) -> Patterns:
    """Find thinking patterns: MiniBatchKMeans on embeddings of unit length, which is clustering by cosine.

    Args:
        embeddings: [steps, width], as from `embed_steps`.
        num_patterns: default 128, as in the paper.
        seed: of the clustering.

    Raises ValueError for fewer steps than patterns, and without scikit-learn.

    Source: arXiv 2602.01198, data.
    """
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError:
        raise ValueError("clustering needs scikit-learn: pip install 'routeguard[patterns]'") from None
    if num_patterns < 1 or len(embeddings) < num_patterns:
        raise ValueError(
            f"{num_patterns} patterns were asked for and there are {len(embeddings)} steps; give more steps, or a "
            "smaller num_patterns"
        )
    means = MiniBatchKMeans(num_patterns, random_state=seed, n_init=3, batch_size=1024).fit(_unit(embeddings))
    centers = _unit(means.cluster_centers_.astype(np.float32))
    patterns = Patterns(centers, np.zeros(0, dtype=np.int64))
    return Patterns(centers, patterns.of(embeddings))


def _unit(vectors: NDArray[Any]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit
