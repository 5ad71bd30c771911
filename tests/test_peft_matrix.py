"""Adapters, quantised bases and 8-bit optimizers: every mode, measured against the weight that a layer applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.optimizers import create_loraplus_optimizer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback
from transformers.pytorch_utils import Conv1D

from routeguard import RouteGuard, Track, find_routes, restore
from routeguard.drift.record import read_drift
from routeguard.protect.held import held_parameters
from routeguard.protect.rows import take_rows
from tests import trainers
from tests.loops import assert_moved, assert_same, routed_values, tiny
from tests.trainers import make, run

pytestmark = pytest.mark.filterwarnings("ignore")

MODES = {**trainers.MODES, "track": lambda: RouteGuard(Track())}
QKV = ["q_proj", "k_proj", "v_proj"]


def adapted(case: str, base: nn.Module | None = None, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": QKV, **options}
    return get_peft_model(tiny(case) if base is None else base, LoraConfig(**settings)).train()


def quantised(case: str, folder: Path, bits: int, **options: Any) -> PeftModel:
    """QLoRA as users make it: a saved model, loaded in 4 or 8 bits."""
    if not (folder / "base").is_dir():
        tiny(case).save_pretrained(folder / "base")
    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}
    config = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    base = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config, device_map={"": "cpu"})
    return adapted(case, prepare_model_for_kbit_training(base), **options)


@torch.no_grad()
def applied(model: nn.Module) -> dict[tuple[int, str], list[Tensor]]:
    """The rows of each route as the model applies them, from the definitions: W + ΣsBA, DoRA's rows rescaled."""
    rows: dict[tuple[int, str], list[Tensor]] = {}
    for route in find_routes(model):
        if route.kind != "weight":
            continue
        name, marker, _ = route.parameter.partition(".base_layer.")
        if not marker:
            weight = model.get_parameter(route.parameter)
        else:
            layer = model.get_submodule(name)
            base = dequantize_module_weight(layer.get_base_layer()).double()
            base = base.T if isinstance(layer.get_base_layer(), Conv1D) else base
            weight = base.clone()
            for adapter in layer.active_adapters:
                a, b = (factor[adapter].weight.double() for factor in (layer.lora_A, layer.lora_B))
                tuned = base + layer.scaling[adapter] * (b @ a)
                if adapter in layer.lora_magnitude_vector:
                    m = layer.lora_magnitude_vector[adapter].weight.double().flatten()
                    tuned = (m / tuned.norm(dim=1))[:, None] * tuned
                weight += tuned - base
        rows.setdefault((route.layer, route.role), []).append(take_rows(weight, route.rows).clone())
    return rows


def base_rows(model: nn.Module) -> dict[tuple[int, str], list[Tensor]]:
    """The same without adapters, which is what drift is relative to."""
    with model.disable_adapter():
        layers = [m for m in model.modules() if hasattr(m, "lora_A")]
        kept = [layer._active_adapter for layer in layers]
        for layer in layers:
            layer._active_adapter = []
        found = applied(model)
        for layer, active in zip(layers, kept, strict=True):
            layer._active_adapter = active
    return found


def distance(now: list[Tensor], then: list[Tensor]) -> float:
    return sum((x.double() - y.double()).square().sum().item() for x, y in zip(now, then, strict=True)) ** 0.5


def check(mode: str, model: PeftModel, folder: Path, **options: Any) -> Trainer:
    """Train; held rows as the mode promises, and the drift of the last step as the definitions give it."""
    start, base = applied(model), base_rows(model)
    trainer = run(model, folder, MODES[mode](), **options)
    end = applied(trainer.model)
    _, samples = read_drift(folder / "routeguard" / "drift.jsonl")
    factors = samples[-1].factors
    assert factors.keys() == start.keys() and (max(factors.values()) > 0) == (mode != "freeze")
    for cell, value in factors.items():
        size = distance(base[cell], [torch.zeros_like(t) for t in base[cell]])
        if mode in ("freeze", "restored"):
            assert all(torch.equal(x, y) for x, y in zip(start[cell], end[cell], strict=True)), cell
        else:
            assert value == pytest.approx(distance(end[cell], start[cell]) / size, rel=2e-3), cell
    return trainer


METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "pissa_dora": {"init_lora_weights": "pissa", "use_dora": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, mode: str, tmp_path: Path) -> None:
    check(mode, adapted("lfm2", **METHODS[method]), tmp_path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bits", "method"), [(4, "lora"), (4, "dora"), (8, "lora")])  # 8-bit DoRA fails by itself
def test_quantised_bases(bits: int, method: str, mode: str, tmp_path: Path) -> None:
    check(mode, quantised("qwen3_5_text", tmp_path, bits, **METHODS[method]), tmp_path / "run")


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("methods", [("lora", "lora"), ("lora", "dora"), ("dora", "dora")], ids="_".join)
@pytest.mark.parametrize("mode", MODES)
def test_two_adapters_at_once(mode: str, methods: tuple[str, str], case: str, tmp_path: Path) -> None:
    model = adapted(case, **METHODS[methods[0]])
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=QKV, **METHODS[methods[1]]))
    model.base_model.set_adapter(["default", "second"])
    check(mode, model, tmp_path)


@pytest.mark.parametrize("case", ["zamba", "zamba2"])
@pytest.mark.parametrize("mode", MODES)
def test_tied_blocks(mode: str, case: str, tmp_path: Path) -> None:
    check(mode, adapted(case), tmp_path)


@pytest.mark.parametrize("case", ["lfm2_moe", "qwen3_next"])
@pytest.mark.parametrize("mode", MODES)
def test_experts_through_target_parameters(mode: str, case: str, tmp_path: Path) -> None:
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    if not any(name.endswith(experts[0]) for name, _ in tiny(case).named_parameters()):
        pytest.skip("the experts of this transformers are modules")
    trainer = check(mode, adapted(case, target_parameters=experts), tmp_path)
    learnt = [p.any() for name, p in trainer.model.named_parameters() if "experts" in name and "lora_B" in name]
    assert learnt and all(learnt)


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("mode", MODES)
def test_modules_to_save(mode: str, case: str, tmp_path: Path) -> None:
    """Whole copies of the projections train, and the routes are those copies."""
    model = adapted(case, target_modules=["v_proj"], modules_to_save=["q_proj", "k_proj"])
    names = {h.name for h in held_parameters(model, find_routes(model))}
    assert names and all(".modules_to_save.default." in name for name in names)
    check(mode, model, tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_lora_plus(mode: str, tmp_path: Path) -> None:
    """B learns at 16 times the rate of A in groups of its own, which keep their ratio."""
    model = adapted("lfm2")
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    check(mode, model, tmp_path, trainer_options={"optimizers": (optimizer, None)}, lr_scheduler_type="constant")
    tagged = {round(group["lr"] / 1e-3, 4) for group in optimizer.param_groups if group.get("routeguard")}
    free = {round(group["lr"] / 1e-3, 4) for group in optimizer.param_groups if group["params"]} - tagged
    expected = {"low_lr": {0.1, 1.6}, "anchor": {16.0}}  # the anchor pulls B alone
    assert tagged == expected.get(mode, set()) and free | tagged >= {1.0, 16.0}


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("mode", ["freeze", "restored"])
def test_merged_at_the_end(mode: str, case: str, tmp_path: Path) -> None:
    model = adapted(case)
    before = routed_values(tiny(case))
    merged = run(model, tmp_path / "guarded", MODES[mode]()).model.merge_and_unload()
    assert_same(before, routed_values(merged))
    value = next(name for name, _ in merged.named_parameters() if "self_attn.v_proj.weight" in name)
    assert not torch.equal(merged.get_parameter(value), tiny(case).get_parameter(value))
    free = run(adapted(case), tmp_path / "free").model.merge_and_unload()
    assert_moved(before, routed_values(free))
    restore(free, tiny(case))  # merged unguarded, and repaired
    assert_same(before, routed_values(free))


# -- bitsandbytes' optimizers, full fine-tuning -----------------------------------------------------------------------

OPTIMIZERS = ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "rmsprop_bnb_8bit", "ademamix_8bit"]
each_optimizer = pytest.mark.parametrize("optim", OPTIMIZERS)


def tuned(case: str, folder: Path, optim: str, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    options = {"learning_rate": 1e-3, "weight_decay": 0.0, **options}
    trainer = run(tiny(case), folder, *callbacks, optim=optim, **options)
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer).__module__.startswith("bitsandbytes.optim")
    states = {value.dtype for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)}
    assert (torch.uint8 in states) == optim.endswith("8bit")
    return trainer


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
@each_optimizer
def test_8_bit_optimizers_keep_frozen_rows_and_what_track_restores(optim: str, case: str, tmp_path: Path) -> None:
    start, free = routed_values(tiny(case)), tuned(case, tmp_path / "free", optim)
    assert_moved(start, routed_values(free.model))
    assert_same(start, routed_values(tuned(case, tmp_path / "frozen", optim, RouteGuard(), weight_decay=0.1).model))
    assert_same(
        routed_values(free.model), routed_values(tuned(case, tmp_path / "tracked", optim, RouteGuard(Track())).model)
    )
    assert_same(start, routed_values(tuned(case, tmp_path / "restored", optim, MODES["restored"]()).model))


@each_optimizer
def test_8_bit_optimizers_with_low_lr_equal_two_hand_made_groups(optim: str, tmp_path: Path) -> None:
    guarded = tuned("lfm2", tmp_path / "guarded", optim, MODES["low_lr"]())
    plain = make(tiny("lfm2"), tmp_path / "plain", optim=optim, learning_rate=1e-3, weight_decay=0.0)
    kind, settings = plain.get_optimizer_cls_and_kwargs(plain.args, plain.model)
    routed, rate = set(find_routes(plain.model).parameters), settings.pop("lr")
    groups = [
        {"params": [p for n, p in plain.model.named_parameters() if (n in routed) == slow], "lr": rate * scale}
        for slow, scale in ((False, 1.0), (True, 0.1))
    ]
    plain.optimizer = kind(groups, weight_decay=0.0, **settings)
    plain.train()
    assert_same(routed_values(plain.model), routed_values(guarded.model))
    assert_moved(routed_values(tuned("lfm2", tmp_path / "free", optim).model), routed_values(guarded.model))


class PullAfterStep(TrainerCallback):
    """The anchor's definition."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.parts = [(model.get_parameter(n), v) for n, v in routed_values(model).items()]

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        for parameter, start in self.parts:
            parameter.lerp_(start, optimizer.param_groups[0]["lr"] * 30.0)


@each_optimizer
def test_8_bit_optimizers_with_an_anchor_equal_its_definition(optim: str, tmp_path: Path) -> None:
    guarded = tuned("lfm2", tmp_path / "guarded", optim, MODES["anchor"]())
    assert_same(
        routed_values(tuned("lfm2", tmp_path / "plain", optim, PullAfterStep()).model), routed_values(guarded.model)
    )
    assert_moved(routed_values(tuned("lfm2", tmp_path / "free", optim).model), routed_values(guarded.model))


@pytest.mark.parametrize("mode", ["low_lr", "anchor"])
@each_optimizer
def test_8_bit_optimizers_cannot_treat_rows_apart(optim: str, mode: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some rows of .*q_proj.* from bitsandbytes\.optim.*protect=Freeze"):
        tuned("qwen3_5_text", tmp_path, optim, MODES[mode]())


RESUMED_8_BIT = [
    *(("lfm2", mode, optim) for mode in MODES for optim in OPTIMIZERS),
    *(("qwen3_5_text", mode, optim) for mode in ("freeze", "track") for optim in OPTIMIZERS[:3]),  # rows
]


@pytest.mark.parametrize(
    ("case", "mode", "optim"),
    [
        pytest.param(*row, marks=() if row[2] in ("adamw_8bit", "paged_adamw_8bit") else pytest.mark.slow)
        for row in RESUMED_8_BIT
    ],
)
def test_resuming_with_8_bit_and_paged_optimizers_is_bit_identical(
    case: str, mode: str, optim: str, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "weight_decay": 0.1}
    straight = tuned(case, tmp_path, optim, MODES[mode](), **saving)
    values = {name: value.detach().clone() for name, value in straight.model.named_parameters()}
    states = optimizer_states(straight)
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    again = run(
        tiny(case, seed=1),
        tmp_path,
        MODES[mode](),
        resume=str(tmp_path / "checkpoint-2"),
        optim=optim,
        **{"learning_rate": 1e-3, **saving},
    )
    assert_same(values, {name: value.detach() for name, value in again.model.named_parameters()})
    assert_same(states, optimizer_states(again))
    assert read_drift(tmp_path / "routeguard" / "drift.jsonl")[1] == samples
    assert [sample.step for sample in samples] == [1, 2, 3, 4]
    start = routed_values(tiny(case))
    if mode in ("freeze", "restored"):
        assert_same(start, routed_values(again.model))
    else:
        assert_moved(start, routed_values(again.model))


def optimizer_states(trainer: Trainer) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state, by the position of its parameter in the groups."""
    saved = trainer.optimizer.optimizer.state_dict()["state"]
    return {
        f"{at} {key}": value.clone()
        for at, state in saved.items()
        for key, value in state.items()
        if torch.is_tensor(value)
    }
