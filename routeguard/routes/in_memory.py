"""Describe an `nn.Module` to `resolve`: its config as a dict, its parameters as names, logical shapes and dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from routeguard.routes.block import TensorInfo, UnknownLayoutError
from routeguard.routes.names import canonical_name

# Parameters that adapters add inside a wrapped layer; the base parameter stays the route.
_ADAPTER = re.compile(
    r"\.(lora_|ia3_|vera_|hada_|lokr_|oft_|boft_|fourierft|randlora_|adapter_|hra_|ln_tuning|prompt_|bone_|miss_|shira_|c3a_)"
)

_COPY = re.compile(r"\bmodules_to_save\.(?P<adapter>[^.]+)\.")


def model_config(model: nn.Module) -> dict[str, Any]:
    """The config of a Hugging Face model (possibly wrapped) as a plain dict with normalised layer types.

    Raises ValueError when no module carries a config.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in _unwrapped(model)]
    config = next((config for config in configs if hasattr(config, "to_dict")), None)
    if config is None:
        raise UnknownLayoutError(
            f"{type(model).__name__} has no Hugging Face config, so its layers cannot be told apart; pass the "
            "transformers model (wrapped is fine), or freeze its queries and keys by hand (requires_grad_(False))"
        )
    data: dict[str, Any] = config.to_dict()
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    section: dict[str, Any] = text.to_dict()
    for key in ("layer_types", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        value = _safe_getattr(text, key)
        if value is not None:
            section.setdefault(key, list(value) if isinstance(value, (list, tuple)) else value)
    # A serialised config may differ from the one in memory (dory doubles its layers on disk).
    for key in ("layer_types", "num_hidden_layers"):
        section[key] = _safe_getattr(text, key) or section.get(key)
    if section.get("model_type") == "mistral":
        section.pop("layer_types")  # the class ignores them; from_pretrained would have made it a ministral
    if text is config:
        return section
    return {**{k: v for k, v in data.items() if not isinstance(v, dict)}, "text_config": section}


def model_name(model: nn.Module) -> str | None:
    """Name or path that a model (wrapped is fine) was loaded from; None where it was made in memory."""
    names = [getattr(getattr(module, "config", None), "_name_or_path", None) for module in _unwrapped(model)]
    return next((str(name) for name in names if name), None)


def model_tensors(model: nn.Module) -> dict[str, TensorInfo]:
    """Canonical name to `TensorInfo` of every base parameter, once for each name that it is tied to.

    Shapes are logical: the whole tensor for DTensor and ZeRO-3 shards, unpacked for 4-bit weights. Where adapters
    bring whole copies of a module (PEFT's `modules_to_save`), the copy of the active one is the parameter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, TensorInfo] = {}
    for name, parameter in applied_parameters(model):
        if is_adapter_parameter(name):
            continue
        owner, _, local = name.rpartition(".")
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if local == "weight" and _is_packed(parameter):
            module: Any = modules[owner]
            shape = (int(module.out_features), int(module.in_features))
        info = TensorInfo(first_names[id(parameter)], shape, str(parameter.dtype).removeprefix("torch."))
        tensors.setdefault(canonical_name(name), info)
    return tensors


def applied_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters, duplicates too, without those that PEFT keeps beside the copy that the model computes with.

    A module in `modules_to_save` is there once as the base has it, and once for each adapter. The active adapter's copy
    is the one in use; without one, the base's.
    """
    idle: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if {"original_module", "modules_to_save"} <= module._modules.keys():
            idle += _idle_copies(f"{name}." if name else "", module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.startswith(tuple(idle)):
            yield name, parameter


def copied_for(name: str) -> str:
    """The adapter that a parameter is a whole copy for, from its name; "" for one that is no such copy."""
    match = _COPY.search(name)
    return match["adapter"] if match else ""


def _idle_copies(prefix: str, wrapper: Any) -> list[str]:
    """The prefixes of the parameter names of a `modules_to_save` wrapper's copies that are not in use."""
    used = next((adapter for adapter in wrapper.active_adapters if adapter in wrapper.modules_to_save), None)
    copies = {adapter: f"{prefix}modules_to_save.{adapter}." for adapter in wrapper.modules_to_save}
    return [
        *(at for adapter, at in copies.items() if adapter != used),
        *([] if used is None else [f"{prefix}original_module."]),
    ]


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter was added by an adapter (LoRA and its kin) inside a wrapped layer."""
    return _ADAPTER.search(name) is not None


def is_quantised(parameter: nn.Parameter) -> bool:
    """True for weights stored in integers (bitsandbytes and the like), which cannot be trained or restored in place."""
    return not (parameter.dtype.is_floating_point or parameter.dtype.is_complex)


def _is_packed(parameter: nn.Parameter) -> bool:
    return is_quantised(parameter) and parameter.ndim == 2 and 1 in parameter.shape


def _unwrapped(model: nn.Module) -> list[nn.Module]:
    """The model and what it wraps, outermost last, so that the innermost config-bearing module wins."""
    chain: list[nn.Module] = []
    current: Any = model
    while isinstance(current, nn.Module):
        chain.append(current)
        current = next(
            (
                inner
                for attribute in ("module", "_orig_mod", "base_model", "_fsdp_wrapped_module")
                for inner in [current._modules.get(attribute)]
                if isinstance(inner, nn.Module) and attribute in current._modules
            ),
            None,
        )
        if current is chain[0]:
            break
    peft_base = getattr(chain[0], "get_base_model", None)
    return [peft_base(), *chain] if callable(peft_base) else chain


def _safe_getattr(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses a global read of values that differ by layer
        return None
