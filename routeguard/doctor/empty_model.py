"""The model of a folder without its weights: every module and shape, on the meta device. Its own code never runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from routeguard.doctor.settings import AdapterSettings, TrainingSettings


def empty_model(folder: Path, settings: TrainingSettings) -> Any:
    """The model that the run would load, without weights or adapters.

    Args:
        folder: with a config.json.
        settings: name the dtype of the weights.

    Raises:
        ValueError: the installed transformers has no class for it (or only code in the folder has), or cannot build it.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        dtype = _dtype(config, settings)
        with torch.device("meta"):
            model = _class_of(config)(config).to(dtype)
    except Exception as error:  # whatever the model's own code raises for this config
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{folder}: transformers {transformers.__version__} cannot build this model without code from the folder: "
            f"{first}"
        ) from None
    return model.train()


def adapted(model: Any, adapter: AdapterSettings, settings: TrainingSettings) -> Any:
    """The model wrapped by PEFT as the config asks for it; the adapters have no values either.

    Raises ValueError, in PEFT's words, where it cannot be wrapped.
    """
    import peft
    import torch

    options: dict[str, Any] = {}
    if adapter.target_parameters:
        options["target_parameters"] = list(adapter.target_parameters)
    targets = adapter.target_modules
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=2 * adapter.rank,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        modules_to_save=list(adapter.modules_to_save) or None,
        use_dora=adapter.use_dora,
        **options,
    )
    try:
        wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except Exception as error:
        raise ValueError(f"PEFT cannot put this adapter on the model: {' '.join(str(error).split())}") from None
    if settings.tool == "trl" and settings.quantised_bits is not None:
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)  # as SFTTrainer does over a quantised base
    return wrapped


def _class_of(config: Any) -> Any:
    """The class that the checkpoint names, else the causal language model for its config."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    classes = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in classes:
        raise ValueError(f"{type(config).__name__} is no causal language model")
    return classes[type(config)]


def _dtype(config: Any, settings: TrainingSettings) -> Any:
    import torch

    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    return getattr(torch, stored) if isinstance(stored, str) else stored
