"""A stand-in for image towers that need the timm package."""

from __future__ import annotations

import functools


@functools.cache
def register_stub_tower() -> None:
    """Let the auto classes build gemma3n's image tower as an empty module; text never reaches it."""
    import torch
    from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel

    class StubTower(PreTrainedModel):
        config_class = Gemma3nVisionConfig

        def __init__(self, config: Gemma3nVisionConfig) -> None:
            super().__init__(config)
            self.projection = torch.nn.Linear(config.hidden_size, config.hidden_size)
            self.post_init()

    AutoModel.register(Gemma3nVisionConfig, StubTower, exist_ok=True)
