"""A model's own configuration, looked at through adapters, and the positions that it names."""

from __future__ import annotations

from typing import Any


def without_adapters(model: Any) -> Any:
    """The model below PEFT's wrapper; any other model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def model_config(model: Any) -> Any:
    """The model's own configuration; None for a module without one."""
    return getattr(without_adapters(model), "config", None)


def max_positions(model: Any) -> int | None:
    """The longest context that the configuration names, in tokens; None where it names none."""
    config = model_config(model)
    if config is None:
        return None
    get_text_config = getattr(config, "get_text_config", None)
    text = get_text_config() if callable(get_text_config) else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def refuse_beyond_positions(model: Any, num_tokens: int) -> None:
    """Raise ValueError for more tokens than the model's configuration names positions."""
    positions = max_positions(model)
    if positions is not None and num_tokens > positions:
        raise ValueError(
            f"{num_tokens} tokens are beyond the {positions} positions that this model's configuration names; ask for "
            f"at most {positions}, or insist (insist=True, --insist) if it can go further"
        )
