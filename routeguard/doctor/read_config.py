"""Read configs of TRL's command line, axolotl and LLaMA-Factory: what a guard depends on, and what is not looked at."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from routeguard.doctor.config_values import Values, read_values
from routeguard.doctor.known_keys import known_to_axolotl, known_to_llama_factory, known_to_trl
from routeguard.doctor.settings import AdapterSettings, Dtype, TrainingSettings
from routeguard.training.engines import Engine

AXOLOTL_PLUGIN = "routeguard.integrations.axolotl.RouteGuardPlugin"
_ONLY_AXOLOTL = ("base_model",)
_ONLY_SWIFT = ("tuner_type", "train_type", "external_plugins", "swift_version")
_ONLY_LLAMA_FACTORY = ("finetuning_type", "lora_target", "lora_rank", "template", "stage", "dataset_dir", "cutoff_len")
_DTYPES: dict[str, Dtype] = {
    "auto": "auto", "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip


def read_settings(path: Path) -> TrainingSettings:
    """What a guard depends on in a training config.

    Args:
        path: YAML or JSON as `trl sft --config` takes it, or a YAML of axolotl or LLaMA-Factory.

    Raises:
        ValueError: none of these (one of ms-swift, say), a mixture of them, or a value that is not what its key must
            be.
    """
    values = read_values(path)
    swift = next((key for key in _ONLY_SWIFT if key in values.content), None)
    if swift is not None:
        raise ValueError(
            f"{path} has {swift}, a key of ms-swift, whose configs are not read. Ask about its model alone: routeguard "
            "doctor --model FOLDER, with --protect and --restore as in register(...). That stands for full fine-tuning"
        )
    axolotl = [key for key in _ONLY_AXOLOTL if key in values.content]
    factory = [key for key in _ONLY_LLAMA_FACTORY if key in values.content]
    others = [key for key in ("model_name_or_path", *factory) if key in values.content]
    if axolotl and others:
        raise ValueError(f"{path} has {axolotl[0]} (of axolotl) and {others[0]} (of another tool); whose config is it?")
    if axolotl:
        return _with_unlooked(_read_axolotl(values), values, known_to_axolotl())
    if factory and "model_name_or_path" in values.content:
        return _with_unlooked(_read_llama_factory(values), values, known_to_llama_factory().union(_ONLY_LLAMA_FACTORY))
    settings = _read_trl(values)
    if not values.asked & values.content.keys():
        raise ValueError(
            f"{path} is no config that is understood: it has none of the keys by which TRL ({listed_keys(values)}), "
            "axolotl (base_model) or LLaMA-Factory (finetuning_type) are told"
        )
    return _with_unlooked(settings, values, known_to_trl())


def listed_keys(values: Values) -> str:
    """The keys that were asked for, shortened."""
    return ", ".join(sorted(values.asked)[:4]) + ", …"


def _read_trl(values: Values) -> TrainingSettings:
    options = values.get("model_init_kwargs")
    inner = Values(values.path, options if isinstance(options, dict) else {})
    dtype = _dtype(inner, "dtype", "torch_dtype") or _dtype(values, "dtype", "torch_dtype") or "float32"
    fp16 = values.flag("fp16")
    adapter = None
    if values.flag("use_peft"):
        targets = values.names("lora_target_modules")
        adapter = AdapterSettings(
            rank=values.count("lora_r", 16),
            target_modules=targets[0] if len(targets) == 1 else targets or None,  # as TRL's ModelConfig does
            target_parameters=values.names("lora_target_parameters"),
            modules_to_save=values.names("lora_modules_to_save"),
            use_dora=values.flag("use_dora"),
        )
    bits = 4 if values.flag("load_in_4bit") else 8 if values.flag("load_in_8bit") else None
    settings = TrainingSettings(
        tool="trl",
        model=values.text("model_name_or_path"),
        dtype=dtype,
        mixed_precision="fp16" if fp16 else "bf16" if values.flag("bf16", default=True) else None,
        optimizer=values.text("optim") or "adamw_torch_fused",
        optimizer_options=values.text("optim_args"),
        learning_rate=values.number("learning_rate", 2e-5),
        adapter=adapter,
        quantised_bits=bits,
        problems=_no_section(values),
    )
    return _with_engine(settings, values, unstated_version=_trainer_fsdp_version())


def _no_section(values: Values) -> tuple[str, ...]:
    """TRL's parser stops at a section of ours, in `trl sft` and in a script of one's own."""
    if values.content.get("routeguard") is None:
        return ()
    return (
        "the section routeguard stops the run: TRL refuses keys that are not its own. Take it out of the config, and "
        "give its settings in the script: RouteGuard(protect=..., restore=...)",
    )


def _read_axolotl(values: Values) -> TrainingSettings:
    kind = values.text("adapter")
    problems = [] if values.get("learning_rate") is not None else ["axolotl needs learning_rate, which is not there"]
    adapter = None
    if kind in ("lora", "qlora"):
        linear = values.flag("lora_target_linear")
        named = values.get("lora_target_modules")
        targets = named if isinstance(named, str) else values.names("lora_target_modules") or None
        init = values.get("peft_init_lora_weights")
        adapter = AdapterSettings(
            rank=values.count("lora_r", 8),
            target_modules="all-linear" if linear else targets,
            target_parameters=values.names("lora_target_parameters"),
            modules_to_save=values.names("lora_modules_to_save"),
            use_dora=values.flag("peft_use_dora"),
            init=True if init is None else init,
        )
    elif kind is not None:
        problems.append(f"adapter: {kind} is not looked at, only lora and qlora are")
    mixed: Literal["bf16", "fp16"] | None = None
    if _truthy_or_auto(values, "bf16", "bfloat16"):
        mixed = "bf16"
    elif _truthy_or_auto(values, "fp16", "float16"):
        mixed = "fp16"
    dtypes: dict[str | None, Dtype] = {"bf16": "bfloat16", "fp16": "float16", None: "float32"}
    settings = TrainingSettings(
        tool="axolotl",
        model=values.text("base_model"),
        dtype=_dtype(values, "torch_dtype") or dtypes[mixed],  # it loads the weights themselves in 16 bits
        mixed_precision=mixed,
        optimizer=values.text("optimizer") or "adamw_torch_fused",
        optimizer_options=_options(values.get("optim_args")),
        learning_rate=values.number("learning_rate", 2e-5),
        adapter=adapter,
        quantised_bits=4 if values.flag("load_in_4bit") else 8 if values.flag("load_in_8bit") else None,
        plugins=_plugins(values, problems),
        problems=tuple(problems),
    )
    return _with_engine(settings, values, unstated_version=1)


def _plugins(values: Values, problems: list[str]) -> tuple[str, ...]:
    """axolotl's plug-ins beside ours; a section for ours without it is a problem, since axolotl passes over that."""
    listed = values.names("plugins")
    if values.content.get("routeguard") is not None and AXOLOTL_PLUGIN not in listed:
        problems.append(
            f"the section routeguard does nothing: {AXOLOTL_PLUGIN} is not among the plugins, and axolotl passes over "
            "a section that no plug-in claims. Add it to the list `plugins`"
        )
    return tuple(name for name in listed if name != AXOLOTL_PLUGIN)


def _read_llama_factory(values: Values) -> TrainingSettings:
    kind = values.text("finetuning_type") or "lora"
    problems, adapter = [], None
    if kind == "lora":
        targets = values.names("lora_target") or ("all",)
        pissa = values.flag("pissa_init")
        adapter = AdapterSettings(
            rank=values.count("lora_rank", 8),
            target_modules="all-linear" if targets == ("all",) else targets,
            modules_to_save=values.names("additional_target"),
            use_dora=values.flag("use_dora"),
            init="pissa" if pissa else True,
        )
    elif kind != "full":
        problems.append(f"finetuning_type: {kind} is not looked at, only lora and full are; read as full")
    bf16, fp16 = values.flag("bf16"), values.flag("fp16")
    half: Dtype = "bfloat16" if bf16 else "float16" if fp16 else "float32"
    settings = TrainingSettings(
        tool="llama-factory",
        model=values.text("model_name_or_path"),
        dtype=half if values.flag("pure_bf16") else "float32",  # trained weights are cast up otherwise
        mixed_precision="bf16" if bf16 else "fp16" if fp16 else None,
        optimizer=values.text("optim") or "adamw_torch_fused",
        optimizer_options=values.text("optim_args"),
        learning_rate=values.number("learning_rate", 5e-5),
        adapter=adapter,
        quantised_bits=values.count("quantization_bit", 0) or None,
        problems=tuple(problems),
    )
    return _with_engine(settings, values, unstated_version=_trainer_fsdp_version())


def _with_engine(settings: TrainingSettings, values: Values, *, unstated_version: int) -> TrainingSettings:
    """The settings with what splits the parameters; `unstated_version` of FSDP is the tool's default."""
    sharded = values.get("fsdp") not in (None, "", [], False, "no", "none")
    options = {key.removeprefix("fsdp_"): value for key, value in values.settings("fsdp_config").items()}
    stated = values.get("fsdp_version")
    if values.get("deepspeed"):
        deepspeed = values.settings("deepspeed")
        return replace(settings, deepspeed=deepspeed, engine=Engine("DeepSpeed", own_blocks=frozenset(deepspeed)))
    if not sharded and not (settings.tool == "axolotl" and options):
        return settings
    version = Values(values.path, {"fsdp_version": stated or options.get("version")}).count(
        "fsdp_version", unstated_version
    )
    if version == 2:
        return replace(settings, engine=Engine("FSDP2"))
    whole = Values(values.path, options).flag("use_orig_params", default=True)
    return replace(settings, engine=Engine("FSDP1", use_orig_params=whole))


def _with_unlooked(settings: TrainingSettings, values: Values, known: Collection[str]) -> TrainingSettings:
    """The settings with the keys that nobody asked for or knows; the nearest one that is known stands beside each."""
    section = values.get("routeguard")
    settings = replace(settings, guard=None if settings.tool == "trl" else section)
    left = [key for key in values.content if key not in values.asked and key not in known]
    unlooked = [f"{key}{_nearest(key, values.asked.union(known))}" for key in left]
    return replace(settings, unlooked=(*unlooked, *(f"plugin {name}" for name in settings.plugins)))


def _nearest(key: str, known: Collection[str]) -> str:
    close = get_close_matches(key, sorted(known), n=1, cutoff=0.88)
    return f" (did you mean {close[0]}?)" if close else ""


def _dtype(values: Values, *keys: str) -> Dtype | None:
    name = values.text(*keys)
    if name is None:
        return None
    if name.removeprefix("torch.") not in _DTYPES:
        raise ValueError(f"{values.path}: {keys[0]} is {name!r}; choose from {', '.join(_DTYPES)}")
    return _DTYPES[name.removeprefix("torch.")]


def _truthy_or_auto(values: Values, *keys: str) -> bool:
    return values.get(*keys) == "auto" or values.flag(*keys)


def _options(value: Any) -> str | None:
    """`optim_args` as TrainingArguments takes them: one text."""
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return None if value is None else str(value)


def _trainer_fsdp_version() -> int:
    """The FSDP version of the installed Trainer where a config names none."""
    from transformers import TrainingArguments

    # Releases whose default is 2 have this function (read off 5.24); the earlier default is 1.
    return 2 if hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config") else 1
