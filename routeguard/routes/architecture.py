"""One row of the table of architectures, and the rules that say which layers rotate their queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from routeguard.routes.collection import Pairing
from routeguard.routes.config import Config, rope_parameters
from routeguard.routes.layouts import LAYOUTS, Layout

PositionRule = Callable[[Config, int], bool]  # does this layer rotate its queries and keys?


def always(config: Config, layer: int) -> bool:
    return True


def never(config: Config, layer: int) -> bool:
    return False


def without_alibi(config: Config, layer: int) -> bool:
    return not config.get("alibi")


def if_position_type_is_rope(config: Config, layer: int) -> bool:
    return config.get("position_embedding_type") == "rope"


def if_memory_rope(config: Config, layer: int) -> bool:
    return bool(config.get("use_mem_rope"))


def without_windows(config: Config, layer: int) -> bool:
    """Full layers rotate only in a model that has no windowed ones (exaone4, kolibri1)."""
    return config.get("sliding_window") is None


def in_dense_prefix(config: Config, layer: int) -> bool:
    """cohere2_moe rotates the first, dense layers even where they see everything."""
    if config.get("prefix_dense_sliding_window_pattern", 1) != 1:
        return False
    kinds = config.get("mlp_layer_types")
    return kinds[layer] == "dense" if kinds else layer < int(config.get("first_k_dense_replace") or 0)


def if_theta_of_layer(config: Config, layer: int) -> bool:
    thetas = config.get("layer_rope_theta")
    return bool(thetas and thetas[layer])


def if_theta(config: Config, layer: int) -> bool:
    return bool(rope_parameters(config).get("rope_theta"))


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        model_types: `config.model_type` values of the text decoder (or of the wrapper) that the row describes.
        layout: name of a function in `layouts.LAYOUTS`, or such a function.
        kinds: optional function from the text config to one kind per layer, instead of `layer_kinds`.
        position: whether a layer rotates queries and keys.
        pairing: "half" or "interleaved".
        beside: what mixes tokens in parallel to attention, in every layer of full attention; "" for nothing.
        tied: full layers without tensors of their own use those of an earlier one.
        auxiliary: parameters of the attention module (or modules in it) that shape the logits besides queries and keys:
            learned sinks, relative biases, temperatures. Routes of kind "norm".
        aliases: what a checkpoint (or an unusual module) calls a tensor or submodule of attention, to the name that the
            layout reads, for example {"seek": "q_proj", "offer": "k_proj"}.
        stacks: containers of decoder layers, in order, for models with several stacks; () finds the only one.
        obstacle: why the weights' product is not the logit, if the layout does not say it.
        note: one line for the summary and the docs.
    """

    model_types: tuple[str, ...]
    layout: str | Layout = "automatic"
    kinds: Callable[[Config], tuple[str, ...]] | None = None
    position: PositionRule = always
    pairing: Pairing = "half"
    beside: str = ""
    tied: bool = False
    auxiliary: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[str, ...] = ()
    obstacle: str | None = None
    note: str = ""

    def read(self) -> Layout:
        return LAYOUTS[self.layout] if isinstance(self.layout, str) else self.layout
