"""What a guard depends on in a training config, whatever tool the config is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from routeguard.training.engines import Engine

Tool = Literal["trl", "axolotl", "llama-factory"]
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


@dataclass(frozen=True)
class AdapterSettings:
    """A LoRA adapter as a config asks for it.

    Attributes:
        rank: of A and B.
        target_modules: last names, one regular expression, "all-linear", or None for PEFT's default.
        target_parameters, modules_to_save: PEFT's fields of these names.
        use_dora: whether the magnitude is trained too.
        init: PEFT's `init_lora_weights`; True is B at zero.
    """

    rank: int
    target_modules: str | tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    init: bool | str = True


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of one training run. The defaults are those of TRL's `SFTTrainer(model="id")`.

    Attributes:
        tool: whose config it is.
        model: a folder or Hub id, None if the config names none.
        dtype: of the weights that are trained; "auto" is that of the checkpoint.
        mixed_precision: "bf16", "fp16" or None.
        optimizer: its name in `TrainingArguments.optim`, or one of the tool's own.
        optimizer_options: `optim_args`.
        learning_rate: the peak.
        adapter: None for full fine-tuning.
        quantised_bits: 4 or 8 if the base is loaded quantised.
        engine: what splits the parameters, None for one device and DDP.
        deepspeed: the DeepSpeed config, empty without one.
        guard: the section `routeguard` of a config for a tool with our plug-in; None without it.
        plugins: the tool's plug-ins beside ours, which were not looked at.
        problems: what is wrong with the config itself.
        unlooked: keys that were not looked at.
    """

    tool: Tool = "trl"
    model: str | None = None
    dtype: Dtype = "float32"
    mixed_precision: Literal["bf16", "fp16"] | None = "bf16"
    optimizer: str = "adamw_torch_fused"
    optimizer_options: str | None = None
    learning_rate: float = 2e-5
    adapter: AdapterSettings | None = None
    quantised_bits: int | None = None
    engine: Engine | None = None
    deepspeed: Mapping[str, Any] | None = None
    guard: Mapping[str, Any] | None = None
    plugins: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unlooked: tuple[str, ...] = ()

    @property
    def masters(self) -> bool:
        """Whether an engine keeps float32 masters of trained 16-bit weights, or trains float32 copies of them."""
        return self.engine is not None and self.engine.name != "tensor parallelism" and self.mixed_precision is not None

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage in the DeepSpeed config, 0 where it names none."""
        return int(self._zero.get("stage", 0))

    @property
    def masters_on_disk(self) -> bool:
        """Whether ZeRO swaps the optimizer's state out to disk."""
        offload = self._zero.get("offload_optimizer") or {}
        return self.zero_stage == 3 and isinstance(offload, Mapping) and offload.get("device") == "nvme"

    @property
    def _zero(self) -> Mapping[str, Any]:
        zero = (self.deepspeed or {}).get("zero_optimization") or {}
        return zero if isinstance(zero, Mapping) else {}

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["engine"] = None if self.engine is None else self.engine.name
        del plain["deepspeed"], plain["problems"]
        return plain
