"""RouteGuard with adapters: what moves is the adapter, and ΔW of the held rows is what is guarded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from routeguard import Anchor, LowLR, QKRestore, RouteGuard, Track, find_routes, freeze, track
from routeguard.drift.record import read_drift
from routeguard.protect.held import held_parameters, lora_pairs
from routeguard.protect.rows import take_rows
from tests.loops import tiny
from tests.trainers import make, run

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = {
    "lfm2": ["q_proj", "k_proj", "v_proj"],
    "qwen3_5_text": ["q_proj", "k_proj", "v_proj"],
    "phi3": ["qkv_proj"],
    "gpt2": ["c_attn"],
}


def adapted(case: str, **options) -> nn.Module:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS.get(case, "all-linear"), **options}
    return get_peft_model(tiny(case), LoraConfig(**settings)).train()


def on_quantised(base: Path, bits: int, **options: Any) -> nn.Module:
    """LoRA on a saved model that bitsandbytes loads in 4 or 8 bits, on the CPU."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    stored = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {"load_in_8bit": True}
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**stored), device_map={"": "cpu"}
    )
    torch.manual_seed(0)
    return get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(**{"r": 4, **options}))


def deltas(model: nn.Module) -> dict[str, Tensor]:
    """Routed parameter to s·BA on its held rows, formed the plain way."""
    return {
        pair.routes[0].parameter: take_rows((pair.scale * pair.b @ pair.a).detach(), pair.rows)
        for pair in lora_pairs(model, find_routes(model))
    }


def effective(model: nn.Module, name: str) -> Tensor:
    """The merged weight that the layer computes with, output rows first, held rows and all."""
    layer = model.get_submodule(name[: name.index(".base_layer.")])
    merged = layer.get_base_layer().weight.detach() + layer.get_delta_weight("default").detach()
    if isinstance(layer.get_base_layer(), Conv1D):
        merged = merged.T
    if layer.lora_magnitude_vector:
        merged = (
            merged * (layer.lora_magnitude_vector["default"].weight.detach().flatten() / merged.norm(dim=1))[:, None]
        )
    return merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sft", [False, True], ids=["Trainer", "SFTTrainer"])
@pytest.mark.parametrize("case", TARGETS)
def test_freeze_keeps_delta_of_held_rows_at_zero_and_leaves_the_others_free(case, sft, dtype, tmp_path: Path) -> None:
    model = adapted(case).to(dtype)
    settings = {"gradient_checkpointing": sft, "average_tokens_across_devices": False}
    trainer = run(model, tmp_path, RouteGuard(), sft=sft, **settings)
    routes = find_routes(trainer.model)
    pairs = lora_pairs(trainer.model, routes)
    assert pairs
    for pair in pairs:
        delta = pair.b @ pair.a
        assert not take_rows(delta, pair.rows).any()
        if pair.rows is not None:
            assert delta.any(), "the gate or value rows of a partly held tensor must learn"
    free = [p for n, p in trainer.model.named_parameters() if "v_proj.lora_B" in n]
    assert all(p.any() for p in free)


@pytest.mark.parametrize("case", TARGETS)
def test_unguarded_adapters_move_routing(case: str, tmp_path: Path) -> None:
    trainer = run(adapted(case), tmp_path)
    assert all(delta.any() for delta in deltas(trainer.model).values())


def test_the_base_is_never_touched(tmp_path: Path) -> None:
    model = adapted("lfm2")
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora" not in n}
    trainer = run(model, tmp_path, RouteGuard("anchor"))
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters() if n in before)


def test_low_lr_slows_the_adapter_down(tmp_path: Path) -> None:
    slow, fast = (
        run(adapted("lfm2"), tmp_path / str(i), *callbacks, learning_rate=1e-3)
        for i, callbacks in enumerate(([RouteGuard(LowLR(0.1))], []))
    )
    for name, delta in deltas(slow.model).items():
        assert 0 < delta.norm() < 0.2 * deltas(fast.model)[name].norm()


def test_low_lr_equals_a_hand_made_optimizer(tmp_path: Path) -> None:
    guarded = run(adapted("lfm2"), tmp_path / "a", RouteGuard(LowLR(0.1)))
    plain = make(adapted("lfm2"), tmp_path / "b")
    held = {id(h.parameter) for h in held_parameters(plain.model, find_routes(plain.model))}
    trainable = [p for p in plain.model.parameters() if p.requires_grad]
    cls, options = plain.get_optimizer_cls_and_kwargs(plain.args, plain.model)
    rate = options.pop("lr")
    plain.optimizer = cls(
        [
            {"params": [p for p in trainable if id(p) not in held], "lr": rate, "weight_decay": 0.1},
            {"params": [p for p in trainable if id(p) in held], "lr": rate * 0.1, "weight_decay": 0.1},
        ],
        **options,
    )
    plain.train()
    for (name, a), (_, b) in zip(guarded.model.named_parameters(), plain.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_anchor_scales_delta_and_not_the_shared_factor(tmp_path: Path) -> None:
    """The pull on a fresh adapter is `B ← (1 − lr·λ) B`, which scales ΔW by exactly that and leaves A alone."""
    guard = RouteGuard(Anchor(50.0))
    trainer = make(adapted("lfm2"), tmp_path, guard, max_steps=1, lr_scheduler_type="constant")
    trainer.train()
    plain = make(adapted("lfm2"), tmp_path / "b", max_steps=1, lr_scheduler_type="constant", weight_decay=0.0)
    plain.train()
    for pulled, free in zip(
        lora_pairs(trainer.model, find_routes(trainer.model)),
        lora_pairs(plain.model, find_routes(plain.model)),
        strict=True,
    ):
        assert torch.equal(pulled.b, torch.lerp(free.b, torch.zeros_like(free.b), 1e-2 * 50.0))
        torch.testing.assert_close(pulled.a, free.a, atol=1e-3, rtol=0)


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"init_lora_weights": "pissa"}, {"use_dora": True}],
    ids=["lora", "rslora", "pissa", "dora"],
)
def test_drift_is_that_of_the_merged_weight(case: str, options: dict, tmp_path: Path) -> None:
    model = adapted(case, **options)
    routes = find_routes(model)
    names = {r.parameter for r in routes}
    start = {n: effective(model, n) for n in names}
    trainer = run(model, tmp_path, RouteGuard("track"))
    _, samples = read_drift(tmp_path / "routeguard" / "drift.jsonl")
    for (layer, role), value in samples[-1].factors.items():
        mine = [r for r in routes if (r.layer, r.role, r.kind) == (layer, role, "weight")]
        change = {r.parameter: effective(trainer.model, r.parameter) - start[r.parameter] for r in mine}
        moved = sum(take_rows(change[r.parameter], r.rows).square().sum() for r in mine)
        base = dict(trainer.model.named_parameters())
        whole = sum(take_rows(base[r.parameter], r.rows, r.dim).square().sum() for r in mine)
        assert value == pytest.approx((moved / whole).sqrt().item(), rel=2e-3)


def test_dora_rows_and_magnitudes_are_held(tmp_path: Path) -> None:
    for case in ("lfm2", "qwen3_5_text"):
        model = adapted(case, use_dora=True)
        start = {n: p.detach().clone() for n, p in model.named_parameters() if "magnitude" in n}
        trainer = run(model, tmp_path / case, RouteGuard())
        held = [h for h in held_parameters(trainer.model, find_routes(trainer.model)) if h.part == "magnitude"]
        assert held
        for h in held:
            assert torch.equal(take_rows(h.parameter, h.rows), take_rows(start[h.name], h.rows))
        assert all(not d.any() for d in deltas(trainer.model).values())
    free = run(adapted("lfm2", use_dora=True), tmp_path / "free")
    held = [h for h in held_parameters(free.model, find_routes(free.model)) if h.part == "magnitude"]
    start = dict(adapted("lfm2", use_dora=True).named_parameters())
    assert all(not torch.equal(h.parameter, start[h.name]) for h in held)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_rows_of_an_adapter_with_another_start_are_refused(init: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not zero in its held rows"):
        make(adapted("qwen3_5_text", init_lora_weights=init), tmp_path, RouteGuard())
    whole = run(adapted("lfm2", init_lora_weights=init), tmp_path, RouteGuard())  # whole tensors are fine
    start = adapted("lfm2", init_lora_weights=init)
    names = [h.name for h in held_parameters(start, find_routes(start))]
    before, after = dict(start.named_parameters()), dict(whole.model.named_parameters())
    assert all(torch.equal(before[n], after[n]) for n in names)


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}]
)
def test_restore_at_the_end_puts_the_initial_adapter_back(options: dict, tmp_path: Path) -> None:
    model = adapted("lfm2", **options)
    start = {h.name: h.parameter.detach().clone() for h in held_parameters(model, find_routes(model))}
    trainer = run(model, tmp_path, RouteGuard(Track(), QKRestore()))
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[n], value) for n, value in start.items())
    free = run(adapted("lfm2", **options), tmp_path / "free")
    moved = dict(free.model.named_parameters())
    assert any(not torch.equal(moved[n], value) for n, value in start.items())


def test_a_mixing_adapter_on_partly_routed_tensors_is_refused(tmp_path: Path) -> None:
    model = get_peft_model(tiny("qwen3_5_text"), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="mixes rows"):
        make(model, tmp_path, RouteGuard())


def test_other_adapters_on_whole_tensors_are_frozen(tmp_path: Path) -> None:
    model = get_peft_model(tiny("lfm2"), IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]))
    trainer = run(model, tmp_path, RouteGuard())
    moved = {n: (p != 1).any() for n, p in trainer.model.named_parameters() if "ia3" in n}
    assert not any(m for n, m in moved.items() if "k_proj" in n)
    assert any(m for n, m in moved.items() if "v_proj" in n)


def test_an_adapter_elsewhere_leaves_nothing_to_slow_down(tmp_path: Path) -> None:
    model = adapted("lfm2", target_modules=["v_proj"])
    guard = RouteGuard("track")
    run(model, tmp_path, guard)
    assert "no routing parameter is trainable" in guard.summary
    with pytest.raises(ValueError, match="none of them trainable"):
        make(adapted("lfm2", target_modules=["v_proj"]), tmp_path, RouteGuard("anchor"))


@pytest.mark.parametrize("targets", [["q_proj", "k_proj"], ["q_proj"]])
def test_an_adapter_on_nothing_but_routing_leaves_nothing_to_train(targets: list[str], tmp_path: Path) -> None:
    model = adapted("llama", target_modules=targets)
    count = sum(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match=rf"nothing to train: all {count} trainable .*protect='low_lr', 'anchor' or"):
        make(model, tmp_path, RouteGuard())
    assert run(model, tmp_path, RouteGuard("low_lr")).state.global_step == 4
    gated = adapted("qwen3_next", target_modules=["q_proj"])  # the gate's rows are free
    assert run(gated, tmp_path / "gated", RouteGuard()).state.global_step == 4


def test_freeze_as_a_function_serves_adapters_too() -> None:
    model = adapted("qwen3_5_text")
    frozen = freeze(model, find_routes(model))
    assert {h.part for h in frozen.rows} == {"lora_B"}
    assert {h.part for h in frozen.whole} == {"lora_A", "lora_B"}  # k_proj is held whole


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_a_quantised_base(bits: int, tmp_path: Path) -> None:
    """bitsandbytes on the CPU: frozen base, drift relative to the dequantised weight, restore of the adapter alone."""
    tiny().save_pretrained(tmp_path / "base")

    def quantised() -> nn.Module:
        return on_quantised(tmp_path / "base", bits, target_modules=TARGETS["lfm2"])

    frozen = run(quantised(), tmp_path / "a", RouteGuard())
    assert all(not delta.any() for delta in deltas(frozen.model).values())
    tracked = run(quantised(), tmp_path / "b", RouteGuard(Track(), QKRestore()))
    assert all(not delta.any() for delta in deltas(tracked.model).values())
    _, samples = read_drift(tmp_path / "b" / "routeguard" / "drift.jsonl")
    assert all(0 < value < 10 for value in samples[-1].factors.values())
    layers = json.loads((tmp_path / "b" / "routeguard" / "restore.json").read_text())["layers"]
    before = {(layer["layer"], role): value for layer in layers for role, value in layer["drift_before"].items()}
    assert before == (pytest.approx(dict(samples[-1].factors), rel=1e-3) if bits == 4 else {})
    bare = quantised().unload()
    with pytest.raises(ValueError, match="all 4 routing tensors are stored quantised and no adapter"):
        track(bare, find_routes(bare))
    with pytest.raises(ValueError, match="stored quantised and there is no adapter"):
        RouteGuard()._protector.hold(quantised().unload())


@pytest.mark.parametrize("case", ["lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("mode", ["freeze", "low_lr", "anchor", "track"])
def test_resume_with_an_adapter_is_bit_identical(mode: str, case: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    straight = run(adapted(case), tmp_path / "a", RouteGuard(mode), **saving)
    run(adapted(case), tmp_path / "b", RouteGuard(mode), **saving)
    again = run(adapted(case), tmp_path / "b", RouteGuard(mode), resume=str(tmp_path / "b" / "checkpoint-2"), **saving)
    for (name, a), (_, b) in zip(straight.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def trained(case: str) -> nn.Module:
    """An adapter that an earlier stage has moved from zero."""
    model = adapted(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def test_rows_of_a_trained_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not zero in its held rows"):
        make(trained("qwen3_5_text"), tmp_path, RouteGuard())
    with pytest.raises(ValueError, match="feeds routing rows and others"):
        make(trained("qwen3_5_text"), tmp_path, RouteGuard("anchor"))


def test_a_trained_adapter_must_say_which_start_it_protects(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has been trained before"):
        run(trained("lfm2"), tmp_path, RouteGuard("track"))
    run(trained("lfm2"), tmp_path, RouteGuard("track", reference="start"))


def test_anchor_holds_both_factors_of_a_trained_adapter(tmp_path: Path) -> None:
    """With a full pull every step nothing may be left of the step."""
    start = deltas(trained("lfm2"))
    guard = RouteGuard(Anchor(100.0), reference="start")
    held = run(trained("lfm2"), tmp_path, guard, lr_scheduler_type="constant")
    for name, delta in deltas(held.model).items():
        assert torch.equal(delta, start[name])


def test_freeze_of_an_adapter_accepts_the_base_as_reference(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "base")
    run(adapted("lfm2"), tmp_path / "a", RouteGuard(reference=str(tmp_path / "base")))
    with pytest.raises(ValueError, match="differ from the reference"):
        run(trained("lfm2"), tmp_path / "b", RouteGuard(reference=str(tmp_path / "base")))
    tiny(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="differ from the reference"):
        run(adapted("lfm2"), tmp_path / "c", RouteGuard(reference=str(tmp_path / "other")))
