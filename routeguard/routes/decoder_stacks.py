"""Find the text decoder's layers, and the self-attention modules in them, among a model's parameter names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from routeguard.routes.block import Block, TensorInfo, UnknownLayoutError
from routeguard.routes.config import Config
from routeguard.routes.names import canonical_name

Layers = dict[int, dict[str, TensorInfo]]  # layer index to {name inside the layer: tensor}

# A decoder layer inside a name: outermost container ("layers" or a synonym), index, rest.
_LAYER = re.compile(
    r"^(?P<stack>(?:.*?\.)?(?:layers|h|blocks|block|layer|decoder_layers))\.(?P<index>\d+)\.(?P<rest>.+)$"
)
_NOT_THE_DECODER = re.compile(
    r"(^|[._])(vision|visual|vit|audio|image|img|speech|talker|code2wav|code_predictor|connector|qformer|perceiver|resampler|"
    r"aligner|projector|mtp|sam|vqmodel|codec|depth_decoder|token2wav|tower|nextn|eagle|draft|assistant|embedder|patcher|"
    r"local_encoder|local_decoder|qwen2_model)([._\d]|$)"
    r"|vision_|visual_|audio_|image_|encoder\b(?!_)"
)
_NOT_SELF_ATTENTION = re.compile(
    r"(^|\.)(cross_?attn\w*|cross_?attention|encoder_attn|encoder_decoder_attention|EncDecAttention|crossattention|linear_attn|"
    r"indexer|compressor|adapter|mamba|conv|short_conv|mlstm_layer|mlp|moe|feed_forward|block_sparse_moe)(\.|$)"
)
# What tells an attention module: the projection of its queries, or of more than those.
_MARKERS = (
    "q_proj", "q_proj.linear", "qkv_proj.q_proj", "Wq", "query", "attention.query", "project_q", "q_b_proj",
    "q_gate_proj", "qkv_proj", "Wqkv", "query_key_value", "c_attn", "att_proj", "gqkv_proj", "kv_proj",
)  # fmt: skip


def decoder_layers(
    tensors: Mapping[str, TensorInfo], num_layers: int, stack_suffixes: tuple[str, ...], aliases: Mapping[str, str]
) -> Layers:
    """Tensors of each decoder layer; towers beside the decoder stay out.

    Args:
        tensors: canonical parameter name to tensor.
        num_layers: how many layers the config gives the decoder; a checkpoint may hold more (token-prediction heads).
        aliases: as for `attention_blocks`.
        stack_suffixes: containers to take, in order, for models that name them in the table; () finds the only one.

    Raises:
        ValueError: several containers could be the decoder, or a named one is missing.
    """
    stacks: dict[str, Layers] = {}
    for name, info in tensors.items():
        match = _LAYER.match(name)
        if match is not None:
            stacks.setdefault(match["stack"], {}).setdefault(int(match["index"]), {})[match["rest"]] = info
    if stack_suffixes:
        return _concatenated(stacks, stack_suffixes)
    candidates = {stack: layers for stack, layers in stacks.items() if not _NOT_THE_DECODER.search(stack)} or stacks
    attending = {
        stack: layers
        for stack, layers in candidates.items()
        if any(_modules(layer, aliases) for layer in layers.values())
    }
    for enough in (int.__ge__, int.__eq__):
        if len(attending) > 1:
            attending = {s: layers for s, layers in attending.items() if enough(len(layers), num_layers)} or attending
    if len(attending) > 1:
        raise UnknownLayoutError(
            f"several stacks of layers could be the text decoder: {sorted(attending)}; register a row that names "
            "them in `stacks` (routeguard.register_architecture)"
        )
    return next(iter((attending or candidates).values()), {})


def attention_blocks(
    tensors: Mapping[str, TensorInfo], layer: int, config: Config, aliases: Mapping[str, str]
) -> list[Block]:
    """The self-attention modules of one layer, outermost only, in order.

    `aliases`: what a tensor or submodule is called in checkpoints, to its name in the module.
    """
    modules = _modules(tensors, aliases)
    outermost = [m for m in dict.fromkeys(modules) if not any(m.startswith(f"{o}.") for o in modules if o != m)]
    blocks = []
    for module in outermost:
        prefix = f"{module}." if module else ""
        inside = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        renamed = {_in_module(name, aliases): info for name, info in inside.items()}
        blocks.append(Block(layer, _module_name(inside, prefix), renamed, config))
    return blocks


def _concatenated(stacks: Mapping[str, Layers], suffixes: Iterable[str]) -> Layers:
    joined: Layers = {}
    for suffix in suffixes:
        found = [stack for stack in stacks if stack == suffix or stack.endswith(f".{suffix}")]
        if len(found) != 1:
            raise UnknownLayoutError(
                f"the table expects one stack of layers named {suffix!r}; the model has {sorted(stacks)}"
            )
        offset = len(joined)
        joined.update({offset + i: stacks[found[0]][index] for i, index in enumerate(sorted(stacks[found[0]]))})
    return joined


def _modules(tensors: Mapping[str, TensorInfo], aliases: Mapping[str, str]) -> list[str]:
    """The module of each tensor that tells an attention module, in order."""
    markers = (*_MARKERS, *(alias for alias, target in aliases.items() if target in _MARKERS))
    endings = sorted((f".{marker}.weight" for marker in markers), key=len, reverse=True)
    modules = []
    for name in tensors:
        ending = next((ending for ending in endings if f".{name}".endswith(ending)), None)
        if ending is not None and not _NOT_SELF_ATTENTION.search(name):
            modules.append(f".{name}".removesuffix(ending).removeprefix("."))
    return modules


def _in_module(name: str, aliases: Mapping[str, str]) -> str:
    longest_first = sorted(aliases, key=len, reverse=True)
    alias = next((alias for alias in longest_first if name == alias or name.startswith(f"{alias}.")), None)
    return name if alias is None else aliases[alias] + name.removeprefix(alias)


def _module_name(inside: Mapping[str, TensorInfo], prefix: str) -> str:
    """The module's name as the model has it: what a parameter's full name has before its name inside the module."""
    local, info = next(iter(inside.items()))
    segments = info.name.split(".")
    for at in reversed(range(len(segments))):  # wrappers put segments of their own between (`q_proj.base_layer.weight`)
        if canonical_name(".".join(segments[at:])) == local:
            return ".".join(segments[:at])
    return prefix.removesuffix(".")
