"""One sliding window over every softmax layer, as some model types have it."""

from __future__ import annotations

from routeguard.routes.config import Config

# A set `sliding_window` narrows every softmax layer of these (read off the modelling code): the window that the
# config class assumes when the key is absent, and whether `use_sliding_window` has to be on as well.
_WINDOW_ON_ALL: dict[str, tuple[int | None, bool]] = {
    "mistral": (4096, False),
    "voxtral_realtime_text": (4096, False),
    "qwen3_moe": (4096, True),
    **dict.fromkeys(
        ("ministral3", "mixtral", "phi3", "phimoe", "starcoder2", "minimax", "phi4_multimodal", "doge"), (None, False)
    ),
}
_LISTED_ANYWAY = ("minimax",)  # the window narrows layers that are labelled full


def window_on_all(config: Config, *, listed: bool) -> bool | None:
    """Whether one window narrows every softmax layer; None for model types of which this is not known.

    A window that is as long as the longest context narrows nothing. `listed`: the config labels its layers.
    """
    model_type = str(config.get("model_type", ""))
    if model_type not in _WINDOW_ON_ALL:
        return None
    default, needs_flag = _WINDOW_ON_ALL[model_type]
    window = config.get("sliding_window", default)
    if (
        not window
        or (needs_flag and not config.get("use_sliding_window"))
        or (listed and model_type not in _LISTED_ANYWAY)
    ):
        return False
    context = config.get("max_position_embeddings")
    return not (isinstance(context, int) and window >= context)
