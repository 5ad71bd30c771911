"""Parameter names without the segments that wrappers add, so that one table serves every way of wrapping a model."""

from __future__ import annotations

import re

# Prefixes of whole-model wrappers (DDP, torch.compile, PEFT), infixes of per-module ones (checkpointing, FSDP1, PEFT).
_PREFIX = re.compile(r"^(?:module\.|_orig_mod\.|base_model\.model\.(?=.))+")
_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "original_module.")
# PEFT nests one wrapper in another where two tensors of a module have adapters: the inner adapter keeps its place.
_BASE_LAYERS = re.compile(r"(?:\bbase_layer\.)+(?!lora_|base_layer\.)")
_MODULES_TO_SAVE = re.compile(r"modules_to_save\.[^.]+\.")


def canonical_name(name: str) -> str:
    """`base_model.model.layers.3.self_attn.q_proj.base_layer.weight` → `layers.3.self_attn.q_proj.weight`."""
    name = _PREFIX.sub("", name)
    for infix in _INFIXES:
        name = name.replace(infix, "")
    return _MODULES_TO_SAVE.sub("", _BASE_LAYERS.sub("", name))


def without_late_wrappers(name: str) -> str:
    """A name in `named_parameters()` as it was before an engine put wrappers around inner modules."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", "")
